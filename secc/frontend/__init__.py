"""From the user's model file to IR: the survey of the dataset, the capture of forward, fusible code and
tensor-parallel layouts."""
