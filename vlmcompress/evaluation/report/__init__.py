"""Reports: a folder with `results.json` for programs, `report.html` and `report.md` for people, and `junit.xml` for CI.

`findings` derives what results show, `sections` arranges it in paragraphs and tables (`document`), and `text` and `html` render
those. `files.write_report` writes the folder for one comparison of a candidate with its baseline, `comparison.write_comparison`
for several. `layers` and `search` are the reports of `report --errors` and `search`.
"""
