"""Each plugin as the cases see it; a module has one name that they use, ``PLUGIN``."""
