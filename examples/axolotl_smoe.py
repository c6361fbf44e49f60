"""A plug-in for axolotl 0.21 that lets smoe compute the experts. In the configuration, with this folder on PYTHONPATH:

  plugins: [axolotl_smoe.SmoePlugin]
  experts_implementation: smoe
"""

from axolotl.integrations.base import BasePlugin

import smoe.transformers  # noqa: F401, registers the implementation "smoe" before axolotl reads the configuration


class SmoePlugin(BasePlugin):
    pass
