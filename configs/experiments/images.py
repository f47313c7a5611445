"""images: a small vision Transformer on images of one's own, for a laptop.

    python train.py --config=configs/fsdp.py:images --config.data.path=FOLDER

FOLDER has one subfolder for each class; docs/data.md lists the other forms. The size and the channels of the images and
the number of classes are read from the data. 1,000 steps on 8 devices simulated from 2 CPU cores take 5 minutes for
grey images of 28×28 pixels. CIFAR-10 in that form (50,000 images, 1.3 epochs) gives an accuracy of 47.8% on the 10,000
test images. Larger images have more patches: give them a larger model.patch_size, or scale them down with data.resize.
Use --config.data.augment=False if left and right matter, as in digits.
"""

from ml_collections import ConfigDict


def images(config: ConfigDict) -> None:
  config.data.update(name="images", augment=True)
  config.model.update(inputs="images", objective="class", mlp_width=256)
  config.optimizer.update(learning_rate=2e-3, weight_decay=0.05)
  config.update(steps=1000, batch_size=64, log_every=50, eval_every=500, eval_batch_size=192, eval_examples=0)
