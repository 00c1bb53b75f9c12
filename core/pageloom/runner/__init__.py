"""The data plane of a step: assemble the batch, run the model, sample."""
