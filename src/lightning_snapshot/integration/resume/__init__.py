"""What a run needs besides weights and counters to go on as if nothing had happened, for each rank by itself.

=============  =====================================================================================================
module         what it keeps
=============  =====================================================================================================
``rng``        random number generators
``passes``     where a pass over a data loader is
``loaders``    where a Trainer's training loaders are, all of them together
``metrics``    torchmetrics in the module, and what ``self.log`` has collected
``progress``   the points at which Lightning's own counters do not go on exactly
``state``      all of it, for a Trainer
``loop``       random numbers and loaders, for a loop of one's own
=============  =====================================================================================================
"""
