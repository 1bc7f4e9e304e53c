from polyfed import methods as methods
from polyfed.config.recipe import Recipe as Recipe
from polyfed.core.client import Client as Client
from polyfed.core.client import Public as Public
from polyfed.core.method import Method as Method
from polyfed.core.settings import Availability as Availability
from polyfed.core.settings import Compression as Compression
from polyfed.core.settings import Defence as Defence
from polyfed.core.settings import Evaluation as Evaluation
from polyfed.core.settings import Hostile as Hostile
from polyfed.core.settings import Privacy as Privacy
from polyfed.core.settings import Training as Training
from polyfed.data.dataset import from_tensors as from_tensors
from polyfed.data.datasets import load as load
from polyfed.engine.devices import Devices as Devices
from polyfed.engine.federation import Federation as Federation
from polyfed.engine.federation import Run as Run
from polyfed.errors import PolyfedError as PolyfedError
from polyfed.experiments.compare import compare as compare
from polyfed.experiments.data_cache import federate as federate
from polyfed.experiments.estimate import check as check
from polyfed.experiments.prediction import predict as predict
from polyfed.experiments.run import run as run
from polyfed.models.adapt import split as split
from polyfed.models.split import SplitModel as SplitModel

__version__: str
