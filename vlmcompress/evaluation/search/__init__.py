"""Find the recipe that serves a model best while its accuracy stays above a floor.

`search` runs a search from a request to a folder. `space` lists the possible changes to a model, `racing` decides which of them
are asked how many questions, `live_trials` and `trial` write checkpoints and ask them, `speed` computes a candidate's gain,
`trial_log` stores everything on disk, and `outcome` describes the result. Nothing here depends on the command line.
"""
