"""ONNX files, served without torch."""
