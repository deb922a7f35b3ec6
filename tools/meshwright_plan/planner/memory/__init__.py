"""Memory of a rank: from the parameters and layers of a model to the peak of a step.

    bytes                                   are counted in
    --------------------------------------  -----------------------------------------------------
    weights, gradients, optimizer states    meshwright.optimizer.at_rest, from a stage's Elements
    a layer's saved tensors and peaks       planner.layer_run, which runs it on the meta device
    a stage: activations of one             memory.footprint, from its layers: values between
      micro-batch, peaks of its actions     layers once, gradients of shared weights
    buckets in reduction, gathered weights  memory.reduction, from the elements at a layer's turn
    micro-batches in flight, messages,      memory.row, along a pipeline rank's row of actions
      saved tensors on the host
    an optimizer step's own tensors         planner.matrix_step, meshwright.optimizer
    the sum, by category                    memory.rank
    a bound without a schedule              planner.estimates, which selects layouts in a search

``meshwright dryrun`` counts the same bytes by recording every operation of a rank
(``dryrun.recorder``). It takes a minute for a layout, and a search compares thousands: so only the
layers are run here. ``benchmarks/memory_accuracy.py`` compares both with real ranks.
"""
