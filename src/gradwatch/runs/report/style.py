"""How the report looks: light or dark as the reader has it, from a telephone's width to a screen's, and on paper."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --soft: #60646c; --line: #e3e5e8; --card: #f7f8f9;
  --error: #ce2c31; --warning: #ab6400; --notice: #60646c; --ok: #218358; --spark: #0d74ce; --band: #c2e5ff; }
@media (prefers-color-scheme: dark) { :root { --paper: #111315; --ink: #edeef0; --soft: #a1a6ae; --line: #2c3034;
  --card: #191b1e; --error: #ff9592; --warning: #ffca16; --notice: #a1a6ae; --ok: #3dd68c; --spark: #70b8ff;
  --band: #0d3868; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 64px; max-width: 1180px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
header { display: flex; flex-wrap: wrap; gap: 2px 16px; justify-content: space-between; color: var(--soft);
  font-size: 13px; overflow-wrap: anywhere; }
header b { color: var(--ink); letter-spacing: .02em; }
h1 { margin: 0; font-size: 27px; line-height: 1.25; font-weight: 650; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 12px; font-size: 19px; font-weight: 620; }
h3 { margin: 0; font-size: 15px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 6px 0; max-width: 75ch; overflow-wrap: anywhere; }
a { color: inherit; }
.note { color: var(--soft); font-size: 13px; }
.verdict { margin: 16px 0 0; padding: 22px 24px 18px; border-radius: 10px; background: var(--card);
  border-left: 6px solid var(--ok); }
.verdict.error { border-color: var(--error); } .verdict.warning { border-color: var(--warning); }
.verdict.none { border-color: var(--line); }
.verdict ol { margin: 10px 0 4px; padding: 0; list-style: none; }
.verdict li { margin: 8px 0; overflow-wrap: anywhere; } .verdict .try { margin: 3px 0 0; font-size: 14px; }
.verdict a { text-decoration: none; } .verdict a:hover { text-decoration: underline; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 36px; margin: 16px 0 0; }
.facts div { min-width: 76px; } .facts dt { color: var(--soft); font-size: 12.5px; }
.facts dd { margin: 0; font-size: 17px; font-weight: 560; font-variant-numeric: tabular-nums; }
.error { color: var(--error); } .warning { color: var(--warning); } .notice { color: var(--notice); }
.ok { color: var(--ok); } .verdict { color: var(--ink); }
.chip { display: inline-block; min-width: 62px; font-size: 12px; font-weight: 650; letter-spacing: .03em;
  text-transform: uppercase; }
figure { margin: 0 0 28px; }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 24px; justify-content: space-between; align-items: center;
  margin-bottom: calc(18px + 17px * var(--level, 0)); }
.bar { display: flex; flex-wrap: wrap; gap: 4px 8px; align-items: center; font-size: 12.5px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.bar i { display: inline-block; height: 11px; border-radius: 2px; }
.scale { width: 130px; } .swatch, .hatch { width: 14px; margin: 0 5px 0 10px; vertical-align: -1px; }
.hatch, .plot { background: repeating-linear-gradient(135deg, var(--line) 0 2px, transparent 2px 6px); }
.grid { display: grid; grid-template-columns: min(34%, var(--names)) minmax(0, 1fr); column-gap: 10px; }
.names, .plot, .axis { position: relative; }
.names { font-size: 12px; line-height: 13px; }
.name { position: absolute; right: 0; max-width: 100%; transform: translateY(-50%); overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; color: var(--soft); }
.name.error { color: var(--error); font-weight: 650; } .name.warning { color: var(--warning); font-weight: 650; }
.plot { border-radius: 3px; }
.plot img, .plot svg { position: absolute; inset: 0; width: 100%; height: 100%; image-rendering: pixelated;
  border-radius: 3px; }
.mark { position: absolute; top: -4px; bottom: 0; width: 0; border-left: 1.5px solid currentColor;
  text-decoration: none; }
.mark b { position: absolute; bottom: calc(100% + 17px * var(--level, 0)); left: 0;
  transform: translateX(-50%); min-width: 16px; padding: 0 4px;
  border-radius: 8px; background: currentColor; font-size: 10.5px; line-height: 15px; text-align: center; }
.mark b::first-line { color: var(--paper); }
.axis { height: 20px; margin-top: 3px; font-size: 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
.tick { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.curve path { fill: none; stroke: var(--spark); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.plot.curve { background: none; border-bottom: 1px solid var(--line); height: 76px; }
.alert { margin: 0 0 14px; padding: 14px 18px; border: 1px solid var(--line); border-left-width: 4px;
  border-radius: 8px; break-inside: avoid; }
.alert.error { border-left-color: var(--error); } .alert.warning { border-left-color: var(--warning); }
.alert { color: var(--ink); } .alert:target { background: var(--card); }
.alert h3 { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; }
.try { padding-left: 12px; border-left: 3px solid var(--ok); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
.layers { width: 100%; }
th { text-align: right; font-weight: 560; color: var(--soft); font-size: 12.5px; }
td { text-align: right; border-top: 1px solid var(--line); } td, th { padding: 3px 0 3px 14px; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; padding-left: 0; white-space: normal; overflow-wrap: anywhere;
  min-width: 130px; }
td.s, th.s { text-align: left; } td.s { white-space: normal; }
.plain td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.layers tr:nth-child(1) td { font-weight: 600; }
.spark { display: block; width: 128px; height: 18px; overflow: visible; }
.spark path { fill: none; stroke: var(--spark); stroke-width: 1.2; vector-effect: non-scaling-stroke; }
.spark .b { stroke: var(--band); } .spark .x { stroke: var(--error); } .spark .z { stroke: var(--soft); }
summary { cursor: pointer; font-weight: 600; margin: 12px 0; }
code { font: 13px/1.5 ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
@media (max-width: 640px) { body { padding: 16px 12px 40px; } h1 { font-size: 22px; } .minor { display: none; }
  .verdict { padding: 16px; } .verdict, .alert { border-radius: 6px; } .facts { gap: 6px 24px; }
  .names { font-size: 10.5px; } .spark { width: 84px; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; } .mark b { border: 1px solid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } h2 { break-after: avoid; }
  figure, .alert, tr { break-inside: avoid; } }
"""
"""CSS. Contrast of text on paper is at least 4.5 to 1, light and dark."""
