"""Find the recipe that serves a model best while its accuracy keeps a floor.

`search` is the story from a request to a folder. `space` lists what may be done to a model, `successive_halving` decides which
candidates are asked how many questions by their `posterior`, `live_trials` and `trial` make checkpoints and ask them, `speed`
says what a candidate gains, `trial_log` keeps all of it on disk, and `outcome` describes the result. Nothing here knows the
command line.
"""
