from .cases import compare as compare
from .cases import load_cases as load_cases
from .cases import table as table
