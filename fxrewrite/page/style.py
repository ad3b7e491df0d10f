"""How the page looks: light and dark, wide and narrow, without a script."""

STYLE = """\
:root { color-scheme: light dark; --text: #1b1f24; --page: #fff; --faint: #59636e; --line: #d1d9e0; --link: #0550ae;
  --gone: #ffebe9; --made: #dafbe1; --arguments: #fff8c5; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --page: #0d1117; --faint: #9198a1; --line: #3d444d;
  --link: #79b8ff; --gone: #4b1c20; --made: #12361f; --arguments: #3a2f0b; } }
body { margin: 1.5rem; color: var(--text); background: var(--page); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
a { color: var(--link); } :target { outline: 2px solid var(--link); }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; border-bottom: 1px solid var(--line); }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } .faint, summary { color: var(--faint); }
code, .graph { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.row { display: grid; grid-template-columns: 1fr 1fr; gap: 0 .5rem; }
.row > * { padding: 0 .4rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.one > * { grid-column: 1 / -1; }
.gone { background: var(--gone); } .made { background: var(--made); } .arguments { background: var(--arguments); }
.change { border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); margin: .3rem 0; }
.by { float: right; margin-left: 1rem; font-family: system-ui, sans-serif; }
@media (max-width: 60rem) { .row { grid-template-columns: 1fr; } .row > :empty { display: none; } }
"""
