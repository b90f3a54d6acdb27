"""Reports: a folder with `results.json` for programs, `report.html` and `report.md` for people, `junit.xml` and
`badge.json` for CI. `findings` derives what a report shows, `text` and `html` render it, `files.write_report` writes the folder
for one comparison of a candidate with its baseline, `comparison.write_comparison` for several. `layers` and `search` are the
reports of `report --errors` and `search`.
"""
