"""A run's model as EleutherAI's lm-evaluation-harness asks it: a subclass of its `LM`.

The only module that imports lm_eval. What stands here follows the harness's own backend for Hugging
Face models on what `tst_jax.export` writes, so that both see the same token ids: a context begins
with `Store.beginning`, as a document of the training data does, and its trailing spaces belong to
the continuation, which is cut from the ids of both together. Perplexities of whole texts score that
beginning too, after one more separator, as they do there: for a loss without it there is
`tst_jax.evaluate --heldout`. One thing differs: text that spells a special token is text here, and
that token there.
"""

import functools
import logging
from collections.abc import Callable

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tst_jax import checks
from tst_jax.data.store import Store
from tst_jax.errors import UserError
from tst_jax.scoring import Scorer

MAX_TOKENS = 256  # of a generated text whose task gives no number, as in the harness
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OPTIONS = ("until", "do_sample", "temperature", "top_k", "top_p", *_LENGTHS)


def task_manager(names, include_path=None) -> TaskManager:
    """Knows the tasks, groups and tags of the harness, and those under a folder.

    Raises:
      UserError: a line for each of `names` that is none of them.
    """
    manager = _manager(include_path)
    known = manager.all_tasks
    hint = "; `lm-eval ls tasks` lists them"
    found = [
        f"--tasks: {name} is no task{checks.did_you_mean(name, known, hint)}"
        for name in names
        if name not in known
    ]
    if found:
        raise UserError("\n".join(found))
    return manager


@functools.cache
def _manager(include_path) -> TaskManager:
    """Reads some ten thousand files, which takes seconds."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of many of them
    return TaskManager(include_path=include_path)


def run(lm: "RunLM", names, manager: TaskManager, limit: int, num_fewshot: int) -> dict:
    """Scores of tasks: {"tasks": {name: {"acc,none": ...}}, "versions": {name: ...}}.

    Raises:
      UserError: a task cannot be loaded; `lm` has not been asked then.
    """
    try:
        found = simple_evaluate(
            model=lm,
            tasks=list(names),
            task_manager=manager,
            limit=limit or None,
            num_fewshot=num_fewshot,
            log_samples=False,
        )
    except Exception as error:  # whatever a hub, a file or a function of a task may raise
        if lm.asked or isinstance(error, UserError):
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"--tasks={','.join(names)} cannot be loaded ({why})") from error
    return {"tasks": found["results"], "versions": found.get("versions", {})}


class RunLM(LM):
    """Answers the harness's three kinds of requests.

    Args:
      scorer: called once, at the first request, when all tasks are loaded.
      store: of the run: its vocabulary, and what a text begins with.
      progress: (title, unit) -> context manager with update(done, total).
    """

    def __init__(self, scorer: Callable[[], Scorer], store: Store, progress):
        super().__init__()
        self.asked = False
        self._make, self._progress = scorer, progress
        self._vocabulary, self._beginning = store.vocabulary(), list(store.beginning)
        self._separator_id = store.separator_id

    @functools.cached_property
    def _scorer(self) -> Scorer:
        self.asked = True
        return self._make()

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether it is what greedy decoding gives) of continuations."""
        scorer = self._scorer
        pairs = self._pairs([request.args for request in requests])
        with self._progress("loglikelihood", "requests") as progress:
            return scorer.score(pairs, progress.update)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities in nats of whole texts, which windows of the model's length cover."""
        scorer, pairs, owners = self._scorer, [], []
        texts = self._vocabulary.encode_batch([request.args[0] for request in requests])
        for owner, ids in enumerate(texts):
            windows = get_rolling_token_windows(
                token_list=[*self._beginning, *ids.tolist()],
                prefix_token=self._beginning[-1],
                max_seq_len=scorer.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                pairs.append(window)
                owners.append(owner)
        with self._progress("loglikelihood_rolling", "windows") as progress:
            scores = scorer.score(pairs, progress.update)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, scores):
            sums[owner] += logprob
        return sums

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Texts that go on from contexts, up to the first of their stop strings."""
        scorer = self._scorer
        asked = [(context, _options(given)) for context, given in (r.args for r in requests)]
        room = [scorer.max_length - options["max_gen_toks"] for _, options in asked]
        if min(room, default=1) < 1:
            raise UserError(
                f"a task wants {scorer.max_length - min(room)} new tokens and the model reads "
                f"{scorer.max_length} positions; set max_gen_toks in the task's generation_kwargs"
            )
        texts, found = self._vocabulary.encode_batch([context for context, _ in asked]), []
        with self._progress("generate_until", "texts") as progress:
            for seed, (ids, (_, options), most) in enumerate(zip(texts, asked, room)):
                prompt = [*self._beginning, *ids.tolist()][-most:]
                found.append(self._text(prompt, seed, **options))
                progress.update(len(found), len(asked))
        return found

    def _text(self, prompt, seed, until, max_gen_toks, **how) -> str:
        """What follows a prompt: without the separator, and what stands behind a stop string."""
        decode = lambda new: self._vocabulary.decode([i for i in new if i != self._separator_id])

        def stop(new):
            text = decode(new)
            return new[-1] == self._separator_id or any(word in text for word in until)

        text = decode(self._scorer.generate(prompt, max_gen_toks, stop, seed=seed, **how))
        return text[: min((at for at in map(text.find, until) if at >= 0), default=len(text))]

    def _pairs(self, texts) -> list[tuple[list[int], list[int]]]:
        """(ids of the context, ids of the continuation) of each (context, continuation)."""
        split = []
        for context, continuation in texts:
            kept = context.rstrip()
            split.append((kept, context[len(kept) :] + continuation, bool(context)))
        whole = [context + continuation for context, continuation, _ in split]
        distinct = list(dict.fromkeys([*whole, *(context for context, *_ in split)]))
        ids = {text: i.tolist() for text, i in zip(distinct, self._encode(distinct))}
        pairs = []
        for text, (context, _, given) in zip(whole, split):
            if given:
                cut = len(ids[context])
                pairs.append(([*self._beginning, *ids[context]], ids[text][cut:]))
            elif ids[text][:1] == self._beginning[-1:]:  # spelled out: it stands for itself
                pairs.append((ids[text][:1], ids[text][1:]))
            else:
                pairs.append((self._beginning[-1:], ids[text]))
        return pairs

    def _encode(self, texts):
        return self._vocabulary.encode_batch(texts)


def _options(given: dict) -> dict:
    """`generation_kwargs` of a task as `_text` takes them.

    Raises:
      UserError: an option that sampling here does not have.
    """
    if unknown := sorted(given.keys() - set(_OPTIONS)):
        raise UserError(
            f"generation_kwargs has {', '.join(unknown)}; {', '.join(_OPTIONS)} are understood"
        )
    until = given.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    # As in the harness: a temperature asks for draws, do_sample decides where both are given.
    drawn = given.get("do_sample")
    temperature = 0.0 if drawn is False else float(given.get("temperature") or bool(drawn))
    tokens = next((given[name] for name in _LENGTHS if given.get(name)), MAX_TOKENS)
    return {
        "until": [word for word in until if word],
        "max_gen_toks": int(tokens),
        "temperature": temperature,
        "top_k": int(given.get("top_k") or 0),
        "top_p": float(given.get("top_p") or 1.0),
    }
