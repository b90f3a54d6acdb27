"""Reports: a folder with `results.json` for programs, `report.html` and `report.md` for people, `junit.xml` and
`badge.json` for CI. `findings` says what results show, `text` and `html` lay it out, `files.write` writes the folder for one
comparison of a candidate with its baseline, `comparison.write` for several. `layers` and `search` are the reports of
`report-error` and `search`.
"""
