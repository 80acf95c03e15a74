"""From the user's model file to the `sec` IR: surveying the dataset, describing the inputs, capturing and
comparing forwards."""
