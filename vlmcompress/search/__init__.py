"""Find the recipe that serves a model best while its accuracy keeps a floor.

`space` lists what may be done to a model, `race` decides what is tried and for how long, `belief` what is known of a candidate
so far, `trial` makes a candidate's checkpoint and asks it questions, `speed` says what it wins, `book` keeps all of it on disk,
and `run` is the search as a whole. Nothing here knows the command line.
"""
