"""The CSS of report.html: light and dark theme as the reader prefers, and rules for printing."""

STYLE = (
    """
:root { --bg: #fff; --fg: #1c2530; --soft: #5d6b7a; --line: #dfe5eb; --panel: #f6f8fa;
  --warn: #8a5a00; --warnbg: #fff4da; --bad: #b3261e; --good: #1a6e3c;
  --c0: #0b66c3; --c1: #d9822b; --c2: #3a9d6a; --c3: #8e5cc7; --c4: #c94f6d; --c5: #6b7a8c;
  --c6: #b08d12; --c7: #1d9aa6; --c8: #a0522d; --c9: #7f7f7f; }
@media (prefers-color-scheme: dark) { :root { --bg: #12171d; --fg: #e4e9ef; --soft: #9aa7b5;
  --line: #2a333d; --panel: #1a2129; --warn: #f2c66d; --warnbg: #3a2e12; --bad: #ff8a80;
  --good: #7fd6a0; --c0: #58a6ff; --c1: #f0a35e; --c2: #63c795; --c3: #b794f4; --c4: #f07f9b;
  --c5: #93a1b1; --c6: #d9bd4a; --c7: #55c4cf; --c8: #d08a63; --c9: #bdbdbd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 40px 0 8px; padding-top: 16px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 24px 0 4px; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
h2.bad { color: var(--bad); }
header p { margin: 2px 0; color: var(--soft); }
.warning, .good { padding: 8px 12px; border-radius: 6px; background: var(--warnbg);
  color: var(--warn) !important; margin: 10px 0 !important; }
.good { background: var(--panel); color: var(--good) !important; }
figure { margin: 4px 0 8px; }
svg { width: 100%; display: block; }
svg.lines { height: auto; max-width: 640px; }
svg text { font-size: 12px; fill: var(--fg); font-variant-numeric: tabular-nums; }
svg text.tick { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .whisker { stroke: var(--fg); stroke-width: 1.4; fill: none; opacity: .75; }
svg .dot { fill: var(--fg); opacity: .45; }
svg .line { fill: none !important; stroke-width: 2; }
"""
    + "".join(
        f"svg .c{i} {{ fill: var(--c{i}); }} svg .line.c{i}, svg .whisker.c{i} {{ stroke: var(--c{i}); }}\n"
        f".key .k{i} {{ background: var(--c{i}); }}\n"
        for i in range(10)
    )
    + """
svg .pale { opacity: .4; }
svg text.value { font-weight: 600; }
.legend { margin: 2px 0 8px; font-size: 13px; }
.key { display: inline-block; margin-right: 16px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.note { color: var(--soft); font-size: 13px; margin: 0 0 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin: 4px 0 12px; }
th, td { padding: 4px 10px 4px 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin: 8px 0; }
summary { cursor: pointer; color: var(--soft); }
pre { background: var(--panel); padding: 12px; overflow-x: auto; font-size: 12px; border-radius: 6px; }
td { overflow-wrap: break-word; }
@media (max-width: 600px) { main { padding: 16px 12px 40px; } h1 { font-size: 21px; }
  h3 { overflow-wrap: anywhere; }
  .stack thead { display: none; }
  .stack tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  .stack td { display: flex; justify-content: space-between; gap: 16px; padding: 1px 0; border: 0;
    text-align: right; white-space: normal; }
  .stack td:empty { display: none; }
  .stack td::before { content: attr(data-name); color: var(--soft); text-align: left; flex: none; }
  .stack td:first-child { font-weight: 600; text-align: left; }
  .stack td:first-child::before { display: none; } }
@media print { main { max-width: none; } details { display: none; } }
"""
)
