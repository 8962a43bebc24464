"""What of an existing TorchServe installation will work, told before it is moved."""
