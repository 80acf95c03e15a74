"""What the samples of a task look like for one model: short lists of recipes, the likeliest first.

`search` finds the first recipe that plain PyTorch trains; `inputs` chooses between `texts`, `images`, `audio`
and `series` by the names of forward's parameters; `language` and `rare_language` put images and sounds
(`modalities`) before texts; `labels` adds what a task's loss compares with. Recipes read the model's
configuration and those names; how many tokens stand for an image or a sound is asked of the model itself.
"""
