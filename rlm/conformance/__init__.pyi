from .cases import Case as Case
from .cases import compare as compare
from .cases import load_cases as load_cases
from .cases import run_case as run_case
from .cases import table as table
