"""Object detection in TensorFlow: SSD320 with ResNet-50-FPN, and the augmentation library that feeds it."""
