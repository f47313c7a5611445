"""Models that people have, in and out: folders in the form of Hugging Face (config.json, safetensors, tokenizer.json).

families.py says what a config.json means, tensors.py which tensor is which weight, and folder.py checks and reads a
folder. adopt.py takes the model's shape into a config, and load.py brings weights to where a layout wants them.
export.py writes a folder, or one of adapters in the form of PEFT.
"""

from checkpointing.pretrained.adopt import adopt as adopt
from checkpointing.pretrained.folder import Folder as Folder
from checkpointing.pretrained.folder import is_folder as is_folder
from checkpointing.pretrained.folder import other_form as other_form
from checkpointing.pretrained.load import load as load
from checkpointing.pretrained.load import read_weight as read_weight
