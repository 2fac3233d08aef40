"""Image classification with convolutional networks: ResNet, ResNeXt, SE-ResNeXt, EfficientNet, MobileNetV2."""
