from .build import cpu_features as cpu_features
from .build import kernels_digest as kernels_digest
from .functions import ATTENTION_BLOCK as ATTENTION_BLOCK
from .functions import VOCAB_BLOCK as VOCAB_BLOCK
from .functions import Kernels as Kernels
from .functions import load_kernels as load_kernels
