from ts.torch_handler.base_handler import BaseHandler
import torch
from torchvision import transforms
from PIL import Image
import io

class CustomImageHandler(BaseHandler):
    """
    Custom handler that overrides preprocess and postprocess
    while reusing the default initialize and inference methods.
    """
    image_processing = transforms.Compose([
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(
            mean=[0.485, 0.456, 0.406],
            std=[0.229, 0.224, 0.225]
        ),
    ])

    def preprocess(self, data):
        """Convert raw image bytes to a normalized tensor batch."""
        images = []
        for row in data:
            image_data = row.get("data") or row.get("body")
            image = Image.open(io.BytesIO(image_data))
            image = self.image_processing(image)
            images.append(image)
        return torch.stack(images).to(self.device)

    def postprocess(self, data):
        """Convert model output logits to top-5 predictions."""
        probs = torch.nn.functional.softmax(data, dim=1)
        top5_probs, top5_indices = torch.topk(probs, 5)
        results = []
        for i in range(top5_probs.size(0)):
            result = {}
            for j in range(5):
                idx = top5_indices[i][j].item()
                label = self.mapping.get(str(idx), str(idx)) if self.mapping else str(idx)
                result[label] = top5_probs[i][j].item()
            results.append(result)
        return results
