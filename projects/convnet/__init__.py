"""A convolutional network on CIFAR-10: an ordinary flax module under every strategy that splits something of it.

    python train.py --config=projects/convnet/config.py [--config.strategy=fsdp]

model.py has the network and its program, config.py the config, test_convnet.py the tests.
"""

from projects.convnet.model import ConvNet
from training.settings import PROGRAMS

OWN = {"widths": (64, 128, 256)}  # channels of each stage
PROGRAMS["convnet"] = ConvNet.of
