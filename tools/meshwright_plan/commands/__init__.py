"""Commands of ``meshwright``: plan, dryrun, stages, draw, calibrate, report, plot."""
