"""The page of a comparison: one file, nothing fetched, and curves as a browser would draw them."""

import json
import re
import shutil
import subprocess

import pytest

from tst_jax import report_page

CURVE = {"color": "#c2410c", "dashed": False, "faint": False}
CHART = {
    "switch": {"step": 30, "FLOPs": 300, "data tokens": 120},
    "curves": [
        CURVE
        | {
            "label": "TST </script><b>",
            "loss": [6.0, 5.0, 4.5, 4.25],
            "x": {
                "step": [20, 40, 60, 80],
                "FLOPs": [200, 400, 600, 800],
                "data tokens": [80, 130, 150, 170],
            },
        }
    ],
}
# As much of a browser as the chart asks for. It prints what stands in the picture after each step.
BROWSER = """
class Node {
  constructor(name) { Object.assign(this, {name, at: {}, children: [], on: {}, value: "step"}); }
  setAttribute(key, value) { this.at[key] = String(value); }
  appendChild(node) { this.children.push(node); node.parent = this; }
  replaceChildren() { this.children = []; }
  addEventListener(name, f) { this.on[name] = f; }
  querySelector(selector) { return this.children.find((c) => "." + c.at.class === selector); }
  remove() { this.parent.children = this.parent.children.filter((c) => c !== this); }
  getBoundingClientRect() { return {left: 0, top: 0, width: 920, height: 420}; }
  setPointerCapture() {}
}
const ids = {chart: new Node("svg"), unit: new Node("select"), said: new Node("p"), data: {}};
const document = {
  getElementById: (id) => ids[id], createElementNS: (_, name) => new Node(name),
};
// Names that a script cannot take for itself.
for (const [name, value] of Object.entries({document, top: {}, window: {}, location: {}}))
  Object.defineProperty(globalThis, name, {value});
ids.data.textContent = process.argv[2];
require("vm").runInThisContext(require("fs").readFileSync(process.argv[3], "utf8"));
const seen = [];
const look = () => seen.push(ids.chart.children.map((c) => [c.name, c.at, c.textContent]));
const fire = (node, name, x, y) => node.on[name]({clientX: x, clientY: y, pointerId: 1});
look();
fire(ids.chart, "pointermove", 484, 30);
seen.push(ids.said.textContent);
fire(ids.chart, "pointerdown", 484, 14);
fire(ids.chart, "pointermove", 600, 100);
fire(ids.chart, "pointerup", 906, 376);
look();
fire(ids.chart, "dblclick", 0, 0);
look();
ids.unit.value = "data tokens";
ids.unit.on.change();
look();
console.log(JSON.stringify(seen));
"""


def page_of(chart):
    lists = {"": ["found <this>"], "Environment": ["a & b"]}
    rows = [["", "baseline"], ["steps", "80"]]
    return report_page.page("TST <wins>", chart, "UE5H", rows, lists, {"data.store": "<img src=x>"})


def test_everything_shown_is_escaped_and_nothing_is_fetched():
    page = page_of(CHART)
    for text in ("<wins>", "<this>", "<b>", "<img src=x>"):
        assert text not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "default-src 'none'" in page
    assert set(re.findall(r"[a-z]+://[^ '\"]*", page)) == {"http://www.w3.org/2000/svg"}  # a name
    data = re.search(r'id="data">(.*?)</script>', page)[1]
    assert json.loads(data) == CHART


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    script = tmp_path_factory.mktemp("browser") / "browser.js"
    script.write_text(BROWSER)
    command = ["node", str(script), json.dumps(CHART), str(report_page.CHART)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def points(picture):
    (line,) = [at for name, at, _ in picture if name == "polyline"]
    return [tuple(map(float, pair.split(","))) for pair in line["points"].split()]


def switches(picture):
    return [float(at["x1"]) for _, at, _ in picture if at.get("class") == "switch"]


def test_the_curve_lies_where_its_numbers_say(seen):
    """The panel is 844 x 362; losses after the switch, 4.25 to 5, and 5 percent of room fill it."""
    first = points(seen[0])
    assert [x for x, _ in first] == pytest.approx(
        [62 + 844 * step / 80 for step in (20, 40, 60, 80)]
    )
    height = lambda loss: 376 - 362 * (loss - (4.25 - 0.0375)) / (0.75 + 2 * 0.0375)
    assert [y for _, y in first] == pytest.approx([height(loss) for loss in (6, 5, 4.5, 4.25)])
    assert switches(seen[0]) == pytest.approx([62 + 844 * 30 / 80])


def test_a_drag_zooms_and_a_double_click_goes_back(seen):
    _, _, zoomed, back, _ = seen
    assert [x for x, _ in points(zoomed)][1:] == pytest.approx([62, 484, 906])  # steps 40 to 80
    assert [y for _, y in points(zoomed)] == pytest.approx([y for _, y in points(seen[0])])
    assert not switches(zoomed)  # it lies to the left
    assert points(back) == points(seen[0])


def test_other_units_and_what_a_point_says(seen):
    assert [x for x, _ in points(seen[4])][-1] == pytest.approx(906)
    assert switches(seen[4]) == pytest.approx([62 + 844 * 120 / 170])
    assert seen[1] == (
        "TST </script><b>: step 40, 130 data tokens, 400 FLOPs, held-out loss 5.0000"
    )
