"""data: batches as a function of a position; batches of few lengths; batches of any data set; packed documents."""

from fzero.data.lengths import ByLength as ByLength
from fzero.data.lengths import by_length as by_length
from fzero.data.lengths import pad_to as pad_to
from fzero.data.packing import Packed as Packed
from fzero.data.packing import PackedStream as PackedStream
from fzero.data.packing import packed as packed
from fzero.data.rows import Rows as Rows
from fzero.data.rows import batches as batches
from fzero.data.tokens import DTYPES as DTYPES
from fzero.data.tokens import ORDERS as ORDERS
from fzero.data.tokens import Batch as Batch
from fzero.data.tokens import Batches as Batches
from fzero.data.tokens import Tokens as Tokens
from fzero.data.tokens import _here as _here
from fzero.data.tokens import permute as permute
