"""Parts of one rank (:mod:`.rank`), and the protocol of observers,
called between steps (:mod:`.observer`).
"""

from meshwright.parts.observer import Observer as Observer
from meshwright.parts.observer import StepEvent as StepEvent
from meshwright.parts.observer import StragglerShare as StragglerShare
from meshwright.parts.rank import ENOUGH as ENOUGH
from meshwright.parts.rank import FILES_LOST as FILES_LOST
from meshwright.parts.rank import FLAGS as FLAGS
from meshwright.parts.rank import NOT_MIRRORED as NOT_MIRRORED
from meshwright.parts.rank import NOT_WRITTEN as NOT_WRITTEN
from meshwright.parts.rank import SAVE_DUE as SAVE_DUE
from meshwright.parts.rank import STOP as STOP
from meshwright.parts.rank import ForwardParts as ForwardParts
from meshwright.parts.rank import Parts as Parts
from meshwright.parts.rank import StepFeed as StepFeed
from meshwright.parts.rank import StepStats as StepStats
from meshwright.parts.rank import TrainState as TrainState
from meshwright.parts.rank import is_saved as is_saved
