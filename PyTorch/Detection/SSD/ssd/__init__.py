"""Single-shot object detection: SSD with ResNet backbones, from a COCO-style data set to annotated pictures."""
