"""report.html: a comparison as one file that needs nothing else, with curves that can be zoomed."""

import html
import json
import pathlib

CHART = pathlib.Path(__file__).with_name("report_chart.js")
# Nothing is fetched, whatever stands in the page.
_ALONE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; }
img, svg { max-width: 100%; }
svg { overflow: visible; }
svg { touch-action: none; user-select: none; cursor: crosshair; font-size: 12px; }
svg text { fill: #1f2933; }
.grid { stroke: #e4e9ee; }
.switch { stroke: black; stroke-dasharray: 2 3; }
.curve { fill: none; stroke-width: 2; }
.zoom { fill: #1f2933; opacity: .12; }
.key { display: inline-block; width: 1.4rem; margin: 0 .4rem 0 1rem; vertical-align: middle;
       border-top: 3px solid; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .9rem; border-bottom: 1px solid #d8dee4; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.verdict { font-size: 1.2rem; font-weight: 600; }
"""


def page(verdict: str, chart: dict, picture: str, rows, lists: dict, settings: dict) -> str:
    """The page; everything shown is escaped.

    Args:
      verdict: who won.
      chart: what report_chart.js draws, see there.
      picture: loss.png in base64.
      rows: of the table, a header first.
      lists: {heading: lines}.
      settings: {name: value} of the TST arm.
    """
    esc = lambda value: html.escape(str(value))
    cells = lambda row, tag: "".join(f"<{tag}>{esc(cell)}</{tag}>" for cell in row)
    table = "".join(f"<tr>{cells(row, 'td' if i else 'th')}</tr>" for i, row in enumerate(rows))
    listing = "".join(
        (f"<h2>{esc(heading)}</h2>" if heading else "")
        + "<ul>"
        + "".join(f"<li>{esc(line)}</li>" for line in lines)
        + "</ul>\n"
        for heading, lines in lists.items()
    )
    pairs = "".join(f"<tr>{cells(pair, 'td')}</tr>" for pair in settings.items())
    key = "".join(
        f'<span class="key" style="color: {esc(curve["color"])}; border-top-style: '
        f'{"dashed" if curve["dashed"] else "solid"}"></span>{esc(curve["label"])}'
        for curve in chart["curves"]
        if not curve["faint"]
    )
    data = json.dumps(chart).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_ALONE}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Baseline and TST at equal FLOPs</title>
<style>{_STYLE}</style></head><body>
<h1>Baseline and Token Superposition Training at equal FLOPs</h1>
<p class="verdict">{esc(verdict)}</p>
<p>Held-out next-token loss, nats a token, over
<select id="unit"><option>step</option><option>FLOPs</option><option>data tokens</option></select>
{key}</p>
<svg id="chart" viewBox="0 0 920 420" role="img"
     aria-label="held-out next-token loss of both arms"></svg>
<p id="said">Drag to zoom, double-click to go back.</p>
<details><summary>As a picture, with the difference after the switch</summary>
<img alt="held-out next-token loss of both arms, and their difference"
     src="data:image/png;base64,{picture}"></details>
<table>{table}</table>
{listing}
<details><summary>Settings of the TST arm</summary><table>{pairs}</table></details>
<script type="application/json" id="data">{data}</script>
<script>
{CHART.read_text()}</script>
</body></html>
"""
