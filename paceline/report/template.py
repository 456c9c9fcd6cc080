"""The report's page: HTML and CSS. Everything put into it is escaped, except charts, which come as Markup."""

CSS = """
:root { color-scheme: light dark; --page: #fafaf8; --card: #ffffff; --ink: #1d2129; --soft: #5d6570; --rule: #e2e3e0;
  --blue: #2563c9; --yellow: #d9930d; --purple: #9a4fb5; --green: #15915f; --grey: #8d949e; --pale: #cfd3d8; --red: #c93434; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --card: #1c2027; --ink: #e6e8eb; --soft: #9aa3af; --rule: #2d333c;
  --blue: #6ea3f5; --yellow: #e8b54a; --purple: #c78be0; --green: #4cc38f; --grey: #7d8590; --pale: #4a515b; --red: #f07171; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .8rem; }
.soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: .75rem; margin: 1.6rem 0; }
.card, figure, details { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.card { padding: .7rem .9rem; }
.card b { display: block; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card b.long { font-size: .95rem; line-height: 1.4; padding: .25rem 0; }
.card span, .card i { display: block; font-size: .8rem; font-style: normal; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; }
.figures.small { grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); }
figure { margin: 0; padding: .9rem 1rem .6rem; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
.small figcaption { font-size: .85rem; }
figure p { margin: .2rem 0 0; font-size: .82rem; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-size: .82rem; color: var(--soft); margin: .15rem 0 .2rem; }
.legend i { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .4em; background: var(--c); }
svg { display: block; width: 100%; height: auto; margin-top: .3rem; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--grey); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke-width: 1; opacity: .4; }
.dot, .fill { fill: var(--c); } .mark { fill: var(--red); }
.c-blue { --c: var(--blue); } .c-yellow { --c: var(--yellow); } .c-purple { --c: var(--purple); } .c-green { --c: var(--green); }
.c-grey { --c: var(--grey); } .c-pale { --c: var(--pale); } .c-teal { --c: #2a9d8f; }
details { margin: .6rem 0; padding: .6rem .9rem; } summary { cursor: pointer; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .6rem 0 .2rem; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo,
  Consolas, monospace; max-height: 28rem; overflow: auto; }
pre.prompt { color: var(--soft); border-left: 3px solid var(--rule); padding-left: .8rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--soft); width: 34%; }
footer { margin-top: 3rem; font-size: .82rem; color: var(--soft); }
@media (max-width: 760px) { .figures { grid-template-columns: minmax(0, 1fr); } }
@media print { figure, .card, details { break-inside: avoid; } pre { max-height: none; } }
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>""" + CSS + """</style>
</head>
<body>
<main>
{%- macro show(figure) %}
<figure{% if figure.wide %} class="wide"{% endif %}>
<figcaption>{{ figure.title }}</figcaption>
{%- if figure.legend %}
<div class="legend">{% for colour, name in figure.legend %}<span><i class="{{ colour }}"></i>{{ name }}</span>{% endfor %}</div>
{%- endif %}
{{ figure.svg }}
{%- if figure.note %}
<p>{{ figure.note }}</p>
{%- endif %}
</figure>
{%- endmacro %}
{%- macro table(rows) %}
<table>
{%- for name, value in rows %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{%- endfor %}
</table>
{%- endmacro %}
{%- macro rollout(example, open) %}
<details{% if open %} open{% endif %}><summary><b>reward {{ human(example.reward) }}</b>
<span class="soft">{% if example.step is not none %} · step {{ example.step }}{% endif %} · prompt {{ example.id }}
{%- if example.sample %} · sample {{ example.sample }}{% endif %}</span></summary>
{%- if example.prompt %}
<pre class="prompt">{{ example.prompt }}</pre>
{%- endif %}
<pre>{{ example.text }}</pre>
{%- if example.left_out %}
<p class="soft">… and {{ human(example.left_out) }} characters more</p>
{%- endif %}
</details>
{%- endmacro %}
<header>
<h1>{{ title }}</h1>
<div class="soft">{{ subtitle }}</div>
</header>
<section class="cards">
{%- for card in cards %}
<div class="card"><span>{{ card.label }}</span>
<b{% if card.value | length > 13 %} class="long"{% endif %}>{{ card.value }}</b>
{% if card.note %}<i>{{ card.note }}</i>{% endif %}</div>
{%- endfor %}
</section>
{%- if not num_steps %}
<p>No steps are recorded yet.</p>
{%- endif %}
{%- if alarms %}
<h2>Alarms</h2>
{{ table(alarms) }}
{%- endif %}
<section class="figures">
{%- for figure in figures %}{{ show(figure) }}{% endfor %}
</section>
{%- if others %}
<h2>Further metrics</h2>
<section class="figures small">
{%- for figure in others %}{{ show(figure) }}{% endfor %}
</section>
{%- if without_room %}
<p class="soft">Not drawn: {{ without_room | join(", ") }}.</p>
{%- endif %}
{%- endif %}
{%- if examples.num_read %}
<h2>Best answers</h2>
<p class="soft">Among the last {{ human(examples.num_read) }} rollouts with a reward.</p>
{%- for example in examples.best %}{{ rollout(example, loop.first) }}{% endfor %}
{%- if examples.worst %}
<h2>Worst answers</h2>
{%- for example in examples.worst %}{{ rollout(example, loop.first) }}{% endfor %}
{%- endif %}
{%- endif %}
{%- if details %}
<h2>Summary</h2>
{{ table(details) }}
{%- endif %}
{%- if config %}
<h2>Configuration <span class="soft">({{ config_name }})</span></h2>
{{ table(config) }}
{%- endif %}
<footer>Made by Paceline from metrics.jsonl. Red marks under a curve: steps at which it was not a finite number.</footer>
</main>
</body>
</html>
"""
