"""Reports: one folder with `results.json` for programs, `report.html` and `report.md` for people, `junit.xml` and
`badge.json` for CI. `files.write` makes it of one comparison, `runs.write_comparison` of many.

The page needs nothing from outside: style, charts (inline SVG) and pictures (data URIs) are in it, and it has no script.
"""
