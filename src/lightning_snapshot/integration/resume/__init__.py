"""What a run needs besides weights and counters to go on as if nothing had happened, for each rank by itself.

=============  =====================================================================================================
module         what it keeps
=============  =====================================================================================================
``rng``        random number generators
``indices``    one pass over a data loader
``passes``     following data loaders, and making their passes again
``workers``    random numbers of their worker processes
``shares``     what is left of an epoch for another number of ranks
``loaders``    where a Trainer's training loaders are, all of them together
``metrics``    torchmetrics in the module, and what ``self.log`` has collected
``callbacks``  what Lightning's own callbacks have changed, or exchanged for the time of a validation
``gradients``  what is collected between two steps of the optimizer
``buckets``    the order in which gradients are added up over ranks
``hooks``      the module's hook that comes after a save
``progress``   the points at which Lightning's own counters do not go on exactly
``state``      all of it, for a Trainer
``strategy``   the hooks of a Trainer's strategy
``loop``       random numbers and loaders, for a loop of one's own
=============  =====================================================================================================
"""
