"""`tst_jax.harness` against lm-evaluation-harness itself: its Hugging Face backend on an exported
run gives the same scores, log-probabilities and texts. Skipped where it, torch or transformers is
missing.
"""

import dataclasses
import json
import os

import pytest
from test_evaluate import mesh_of
from test_export import SHAPES

from tst_jax import evaluate as evaluate_lib
from tst_jax import generate
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import train_bpe
from tst_jax.errors import UserError
from tst_jax.evaluate import evaluate
from tst_jax.export import export
from tst_jax.scoring import Scorer
from tst_jax.train import train

TEXTS = ["the cat sat on the mat. a dog ran to the cat. ", "one two three, three two one; ", "so "]
QUESTIONS = [
    ("the cat sat on", [" the mat", " the dog", " a cat"], 0),
    ("a dog ran", [" to the cat", " on one", " so"], 0),
    ("one two", [" one", " three", " two"], 1),
    ("three two ", ["one", "three", "cat"], 1),  # not what the texts say
    ("the cat sat on the mat. a dog ran to the cat. the cat", [" sat", " ran", " mat"], 0),
    ("", ["the cat", "so so so", "three three"], 0),
]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_text": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{target}}"
target_delimiter: ""
metric_list: [{metric: exact_match}]
generation_kwargs: {until: [".", ";"], max_gen_toks: 20, do_sample: false}
""",
}
DOCUMENTS = {
    "tiny_choice": [dict(question=q, options=o, answer=a) for q, o, a in QUESTIONS],
    "tiny_rolling": [dict(text=(TEXTS[i % 2] * (1 + i)).strip()) for i in range(5)],
    "tiny_text": [
        dict(prompt=prompt, target=target)
        for prompt, target in (
            ("the cat sat on", " the mat"),
            ("a dog", " ran to the cat"),
            ("one two three, ", "three two one"),
            ((TEXTS[0] * 4).strip(), " the dog"),
        )
    ],
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, make_config):
    """(workdir, exported folder, folder of task files) of a trained run that knows TEXTS."""
    folder = tmp_path_factory.mktemp("harness")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
    for package in ("torch", "transformers", "lm_eval"):
        pytest.importorskip(package)
    texts = [TEXTS[i % 2] * (3 + i % 5) + TEXTS[2] for i in range(40)]
    tokenizer = train_bpe(texts, 280)
    documents = [(tokenizer.encode(text), len(text)) for text in texts]
    write_store(
        folder / "store",
        vocabulary=tokenizer,
        train=documents,
        heldout=documents[:4],
        separator_id=0,
        provenance={},
    )
    config = make_config(folder / "store")
    config.steps, config.eval.every, config.tst.ratio = 120, 0, 0.2
    config.data.rows, config.data.positions = 8, 40
    config.model = dataclasses.replace(SHAPES["llama"], vocab_size=288)
    train(config, folder / "run")
    export(folder / "run", folder / "out")
    (folder / "tasks").mkdir()
    for name, task in TASKS.items():
        lines = "".join(json.dumps(document) + "\n" for document in DOCUMENTS[name])
        (folder / f"tasks/{name}.jsonl").write_text(lines)
        data = {"data_files": {"test": str(folder / f"tasks/{name}.jsonl")}}
        head = f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: "
        (folder / f"tasks/{name}.yaml").write_text(head + json.dumps(data) + task)
    return folder / "run", folder / "out", folder / "tasks"


@pytest.fixture(scope="module")
def hflm(exported):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(exported[1]), device="cpu", dtype="float32", batch_size=4)


@pytest.fixture(scope="module")
def ours(exported):
    from tst_jax import harness

    workdir = exported[0]
    settings = generate.read_run_config(workdir)
    model, record = generate.load_model(workdir)
    store = generate.open_run_store(settings, record)
    scorer = Scorer(model, mesh_of(data=1), settings["data"]["positions"], 256)
    return harness.RunLM(lambda: scorer, store, evaluate_lib.Progress)


def test_scores_are_the_harness_s_own(exported, hflm):
    """Every figure of every task to 1e-3."""
    from lm_eval import simple_evaluate

    from tst_jax import harness

    workdir, _, tasks = exported
    manager = harness.task_manager(TASKS, str(tasks))
    theirs = simple_evaluate(
        model=hflm, tasks=list(TASKS), task_manager=manager, num_fewshot=0, log_samples=False
    )["results"]
    found = evaluate(workdir, tasks=list(TASKS), include_path=str(tasks), batch_positions=256)
    assert set(found["tasks"]) == set(theirs) == set(TASKS)
    seen = 0
    for task, figures in theirs.items():
        for name, value in figures.items():
            mine = found["tasks"][task][name]
            print(f"{task} {name}: ours {mine}, HFLM {value}")
            if isinstance(value, float):
                assert abs(mine - value) <= 1e-3, (task, name)
                seen += 1
            else:
                assert mine == value
    assert seen >= 8
    assert 0 < found["tasks"]["tiny_choice"]["acc,none"] < 1
    assert 0 < found["tasks"]["tiny_text"]["exact_match,none"] < 1
    assert json.loads(json.dumps(found)) == found
    few = evaluate(workdir, tasks=["tiny_choice"], include_path=str(tasks), limit=3)
    assert few["tasks"]["tiny_choice"]["acc,none"] * 3 % 1 < 1e-9


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def test_each_log_probability_is_the_harness_s_own(hflm, ours):
    """To 1e-3, and greedy where it is: also of empty and of too long contexts, and of spaces."""
    contexts = ["", " ", "the cat", "the cat ", "one two \n", TEXTS[0] * 6, TEXTS[1] * 9 + " "]
    ends = [" sat on the mat.", "sat", "three", ";", " the cat. the cat sat", " zebra"]
    requests = instances("loglikelihood", [(c, e) for c in contexts for e in ends])
    theirs, mine = hflm.loglikelihood(requests), ours.loglikelihood(requests)
    worst = max(abs(a[0] - b[0]) for a, b in zip(theirs, mine))
    print(f"largest difference of {len(requests)} log-probabilities: {worst:.2e}")
    assert worst <= 1e-3
    assert [a[1] for a in theirs] == [b[1] for b in mine]
    assert len({b[1] for b in mine}) == 2 and min(b[0] for b in mine) < -10

    rolling = instances("loglikelihood_rolling", [(t * n,) for t in TEXTS for n in (1, 5, 20)])
    theirs, mine = hflm.loglikelihood_rolling(rolling), ours.loglikelihood_rolling(rolling)
    worst = max(abs(a - b) for a, b in zip(theirs, mine))
    print(f"largest difference of {len(rolling)} rolling log-probabilities: {worst:.2e}")
    assert worst <= 1e-3


def test_texts_are_the_harness_s_own(hflm, ours):
    """Greedy, up to the first stop string, or as long as is asked for."""
    prompts = ["", "the cat", "one two three, ", TEXTS[0] * 5, "so ", "x"]
    for given in (
        {"until": [".", "; "], "max_gen_toks": 16, "do_sample": False},
        {"until": ["\n\n"], "max_gen_toks": 9, "temperature": 0.0},
        {"until": "three", "max_gen_toks": 30},
    ):
        # One text at a time: padding on the left would move the harness's positions.
        asked = instances("generate_until", [(prompt, given) for prompt in prompts])
        theirs = [hflm.generate_until([one])[0] for one in asked]
        mine = ours.generate_until(asked)
        print(mine)
        assert mine == theirs
    assert len(set(mine)) > 2
    warm = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5, "top_p": 0.9}
    requests = instances("generate_until", [("the cat", warm)] * 6)
    drawn = ours.generate_until(requests)
    assert len(set(drawn)) > 2 and drawn == ours.generate_until(requests)


def test_what_the_harness_cannot_be_asked(exported, ours):
    workdir, _, tasks = exported
    with pytest.raises(UserError, match="generation_kwargs has num_beams") as error:
        ours.generate_until(instances("generate_until", [("a", {"num_beams": 3})]))
    with pytest.raises(UserError, match="256 new tokens and the model reads 40") as error:
        ours.generate_until(instances("generate_until", [("a", {})]))
    with pytest.raises(UserError, match="--tasks: tiny_choise is no task.*tiny_choice") as error:
        evaluate(workdir, tasks=["tiny_choise"], include_path=str(tasks))
    assert "\n" not in str(error.value)


def test_a_task_that_cannot_be_loaded_is_one_line(exported, tmp_path):
    task = TASKS["tiny_choice"]
    head = "task: tiny_gone\ndataset_path: json\ntest_split: test\ndataset_kwargs: "
    data = {"data_files": {"test": str(tmp_path / "gone.jsonl")}}
    (tmp_path / "tiny_gone.yaml").write_text(head + json.dumps(data) + task)
    with pytest.raises(UserError, match="--tasks=tiny_gone cannot be loaded") as error:
        evaluate(exported[0], tasks=["tiny_gone"], include_path=str(tmp_path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
