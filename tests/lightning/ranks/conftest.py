"""Ranks with Lightning in them."""

from tests.ranks import processes

# The server from which ranks are forked imports both distributions once, instead of each rank doing so. Conftest files
# are imported before the first test starts the server.
processes._context.set_forkserver_preload([*processes._PRELOADED, "tests.lightning.ranks.worlds"])
