"""A text classifier with a step of its own, as handlers written for TorchServe have."""

from ts.torch_handler.text_classifier import TextClassifier


class Shouting(TextClassifier):
    def _remove_puncutation(self, text):
        return super()._remove_puncutation(text)

    def postprocess(self, data):
        return [{key.upper(): value for key, value in row.items()} for row in super().postprocess(data)]
