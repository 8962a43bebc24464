"""The onnx handler: serves ONNX files without torch."""
