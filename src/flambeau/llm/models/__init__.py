"""The network and its architecture: what config.json says, and which tensor of a checkpoint is which parameter."""
