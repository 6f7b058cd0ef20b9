"""The plugin, callback and helpers for Lightning. The only folder that imports Lightning."""
