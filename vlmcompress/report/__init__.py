"""Reports: a folder with `results.json` for programs, `report.html` and `report.md` for people, `junit.xml` and
`badge.json` for CI. `files.write` writes it for one comparison of a candidate with its baseline,
`runs.write_comparison` for several.

The page needs nothing from outside: style, charts (inline SVG) and pictures (data URIs) are in it, and it has no script.
"""
