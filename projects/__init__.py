"""Projects: code of your own, a folder each. The trainer imports none; a config's field `project` names one."""
