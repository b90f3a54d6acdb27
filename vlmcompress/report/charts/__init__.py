"""Charts as inline SVG: pure functions from numbers to markup, coloured by the page's style sheet.

Charts whose marks are dots, bars and straight lines use percentages across, so they fill any width with text of one size.
Curves (`panels`) need a fixed frame: they are small, and the page lays them side by side.
"""
