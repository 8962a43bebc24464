"""The image_classifier, image_segmenter and object_detector handlers."""
