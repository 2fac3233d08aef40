"""Names of the tensors of one example, as they stand in the dictionaries that `preprocess` takes and returns.

| name | shape | what |
|---|---|---|
| image | [1, H, W, C] (functions: [H, W, C]) | values 0 to 255 |
| groundtruth_boxes | [N, 4] float32 | ymin, xmin, ymax, xmax as fractions of height and width |
| groundtruth_classes | [N] | labels |
| groundtruth_weights | [N] float32 | weight of each object in the loss |
| groundtruth_confidences | [N] float32 | confidence of each label |
| multiclass_scores | [N, classes] float32 | a score of every class for each object |
| groundtruth_instance_masks | [N, H, W] | one mask per object |
| groundtruth_keypoints | [N, K, 2] float32 | y, x as fractions; NaN = not visible |
"""

from __future__ import annotations

IMAGE = "image"
BOXES = "groundtruth_boxes"
CLASSES = "groundtruth_classes"
WEIGHTS = "groundtruth_weights"
CONFIDENCES = "groundtruth_confidences"
SCORES = "multiclass_scores"
MASKS = "groundtruth_instance_masks"
KEYPOINTS = "groundtruth_keypoints"

# The argument of a preprocessing function that each tensor is passed as.
ARGUMENTS = {
    "image": IMAGE,
    "boxes": BOXES,
    "labels": CLASSES,
    "label_weights": WEIGHTS,
    "label_confidences": CONFIDENCES,
    "multiclass_scores": SCORES,
    "masks": MASKS,
    "keypoints": KEYPOINTS,
}
