"""Errors of torch, transformers, pydantic, argparse and Python itself, made by really raising them.

    python benchmarks/foreign_errors.py > foreign.jsonl      # one {"owner", "error_class", "message"} a line

Nothing of this is any other package's error, so a reference of, say, vLLM must claim none of them.
Statements that raise nothing in the versions at hand are told on stderr and left out.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

PYTHON = """
{}['weights'] | {1: 2}[7] | {}[('a', 3)] | {'a': {}}['a']['model.layers.0'] | {}[None] | __import__('os').environ['NO_SUCH_VARIABLE']
[][3] | (1, 2)[5] | 'abc'[9] | [].pop() | set().pop() | {}.popitem() | [1].remove(4) | [].index('x') | 'abc'.index('z')
int('twelve') | int('3.5') | int('ff') | int('0x', 16) | float('1,5') | float('') | int(None) | int([]) | float('inf').as_integer_ratio()
1 / 0 | 5 % 0 | 5 // 0 | 1.5 / 0 | 1.5 % 0 | 0 ** -1 | divmod(1, 0) | __import__('fractions').Fraction(1, 0) | 10.0 ** 400
'a' + 1 | 1 + 'a' | [] + () | None + 1 | {} + {} | 'a' * 'b' | -'a' | ~1.5 | 1 < 'a' | None > 3 | [] >= 3 | {} < {} | object() < object()
len(5) | iter(5) | next(5) | next(iter([])) | abs('a') | sum(['a']) | sorted([1, 'a']) | max([]) | min(()) | ord('ab') | chr(-1) | chr(10**8)
None.shape | 'a'.foo | (1).real.bar | [].push(1) | {}.has_key(1) | print.name | object().weight | int.nothing | type('Model', (), {})().forward
None() | 5() | 'a'() | [1]() | None[0] | (5)[0] | object()[1] | {}.keys()[0] | (1, 2).__setitem__(0, 1) | len(range(10**30))
(lambda a: a)() | (lambda: 1)(2) | (lambda a: a)(b=1) | (lambda a: a)(1, a=2) | (lambda *, k: k)() | (lambda a, b, c: a)(1) | (lambda **k: k)(1, 2, 3)
dict(1) | dict([1]) | dict(['abc']) | set(5) | frozenset([[]]) | {[]: 1} | {{}: 1} | hash([]) | {1: 2, **5} | [*5] | list(5) | tuple(3.5)
print(*None) | ''.join([1, 2]) | ','.join(5) | '%d' % 'a' | '%s %s' % 'a' | '%z' % 1 | '{}'.format() | '{a}'.format() | '{:d}'.format('a') | format(1, 'zz')
open('/nonexistent/file.json') | open('/') | open('/proc/1/mem/x') | open('x', 'zz') | open('/etc/hostname', 'rb').read().decode().foo | open(-5) | open('a\\0b')
__import__('os').listdir('/nonexistent') | __import__('os').remove('/nonexistent') | __import__('os').rmdir('/') | __import__('os').kill(999999999, 0)
__import__('no_such_module') | __import__('os.nothing') | exec('from os import nothing') | exec('import torch.no_such_part') | exec('from . import x')
exec('x = undefined_name') | exec('def f():\\n    y += 1\\nf()') | exec('if True') | exec('a b') | exec('  x = 1') | exec('(') | exec('x = "abc')
exec('a, b = [1]') | exec('a, b = 1, 2, 3') | exec('a, *b, c = [1]') | exec('a, b = 5') | exec('for x in 5: pass') | exec('del nothing') | exec('raise 5')
exec('with 5: pass') | exec('assert 1 == 2') | exec('assert False, [1, 2]') | exec('class A(5): pass') | exec('class A(bool): pass') | exec('def f(a, a): pass') | exec('return 5')
b'\\xff'.decode() | b'\\xff\\xfe'.decode('ascii') | 'ü'.encode('ascii') | 'a'.encode('no-such') | bytes([300]) | bytes('a') | bytearray(-1) | b'a' + 'b' | bytes.fromhex('zz')
__import__('json').loads('') | __import__('json').loads('{') | __import__('json').loads('{"a":}') | __import__('json').loads('[1,]') | __import__('json').loads('nope') | __import__('json').loads('{"a":1}x') | __import__('json').loads("{'a': 1}") | __import__('json').loads('"abc')
__import__('json').dumps(object()) | __import__('json').dumps({(1,): 2}) | __import__('json').dumps({1, 2}) | __import__('json').loads(5) | __import__('json').loads('[' * 100000)
__import__('ast').literal_eval('f(x)') | __import__('ast').literal_eval('{') | __import__('ast').parse('a b c') | compile('x', '', 'nothing') | eval('1 +') | eval('x y')
__import__('math').sqrt(-1) | __import__('math').log(0) | __import__('math').factorial(-1) | __import__('math').exp(1000) | __import__('math').acos(2) | int(float('nan')) | int(float('inf')) | __import__('statistics').mean([]) | __import__('random').choice([])
__import__('random').sample([1], 5) | __import__('random').randint(5, 1) | __import__('random').choices([1], weights=[1, 2]) | __import__('secrets').randbelow(0) | __import__('string').Template('$a').substitute() | __import__('string').Template('$').substitute()
__import__('re').compile('(') | __import__('re').compile('[') | __import__('re').compile('*a') | __import__('re').compile('(?P<a>x)(?P<a>y)') | __import__('re').match('a', 5) | __import__('re').compile('a{5,2}')
__import__('datetime').date(2024, 13, 1) | __import__('datetime').datetime.strptime('x', '%Y') | __import__('datetime').datetime.fromisoformat('x') | __import__('datetime').timedelta(days=10**10) | __import__('time').sleep(-1) | __import__('time').strptime('12', '%H:%M')
__import__('pathlib').Path(5) | __import__('pathlib').Path('/nonexistent').read_text() | __import__('pathlib').Path('a').relative_to('/b') | __import__('pathlib').Path('/a').with_suffix('x') | __import__('pathlib').Path('').with_name('x') | __import__('shutil').copy('/nonexistent', '/tmp/x') | __import__('shutil').move('/nonexistent', '/tmp/x')
__import__('subprocess').run(['/nonexistent/program']) | __import__('subprocess').run(['false'], check=True) | __import__('subprocess').run(['sleep', '9'], timeout=0.01) | __import__('subprocess').run([]) | __import__('subprocess').check_output(['sh', '-c', 'exit 3'])
__import__('socket').create_connection(('127.0.0.1', 1), timeout=1) | __import__('socket').socket().bind(('127.0.0.1', 99999)) | __import__('socket').inet_aton('x') | __import__('ipaddress').ip_address('x') | __import__('ipaddress').ip_network('10.0.0.1/8') | __import__('urllib.request').request.urlopen('nothing://x') | __import__('urllib.request').request.urlopen('http://127.0.0.1:1')
__import__('pickle').loads(b'') | __import__('pickle').loads(b'garbage') | __import__('pickle').dumps(lambda: 1) | __import__('pickle').dumps((x for x in [])) | __import__('copy').deepcopy((x for x in [])) | __import__('marshal').loads(b'') | __import__('struct').unpack('<q', b'123') | __import__('struct').pack('<b', 300) | __import__('struct').pack('z') | __import__('array').array('i', ['a'])
__import__('zipfile').ZipFile('/etc/hostname') | __import__('gzip').decompress(b'no') | __import__('zlib').decompress(b'no') | __import__('lzma').decompress(b'no') | __import__('base64').b64decode('a') | __import__('tarfile').open('/etc/hostname') | __import__('bz2').decompress(b'no')
__import__('sqlite3').connect(':memory:').execute('select') | __import__('sqlite3').connect(':memory:').execute('select * from nothing') | __import__('sqlite3').connect('/nonexistent/x.db') | __import__('configparser').ConfigParser().get('a', 'b') | __import__('configparser').ConfigParser().read_string('x') | __import__('tomllib').loads('a =') | __import__('tomllib').loads('a = 1\\na = 2') | __import__('csv').reader('a', delimiter='ab')
__import__('decimal').Decimal('x') | __import__('decimal').Decimal(1) / 0 | __import__('fractions').Fraction('x') | __import__('uuid').UUID('x') | __import__('enum').Enum('E', 'A B')('C') | __import__('enum').Enum('E', 'A B')['C'] | __import__('enum').IntEnum('Level', 'LOW HIGH')(9) | __import__('operator').itemgetter(1)([]) | __import__('operator').attrgetter('x')(1)
__import__('dataclasses').dataclass(type('A', (), {'__annotations__': {'a': list}, 'a': []})) | __import__('dataclasses').replace(5) | __import__('dataclasses').asdict(5) | __import__('dataclasses').make_dataclass('A', ['x'], frozen=True)(1).__setattr__('x', 2) | __import__('dataclasses').make_dataclass('A', ['x'])() | __import__('dataclasses').make_dataclass('A', ['x'])(y=1)
__import__('abc').ABC.register() | type('A', (__import__('abc').ABC,), {'f': __import__('abc').abstractmethod(lambda s: 1)})() | type('A') | super().x | isinstance(1, 5) | issubclass(1, int) | getattr(1, 'x') | setattr(1, 'x', 2) | delattr(1, 'x') | object.__new__(int) | property().__get__(1)
__import__('asyncio').get_running_loop() | __import__('asyncio').run(5) | __import__('queue').Queue().get_nowait() | __import__('queue').Queue(1).get(timeout=0.01) | __import__('threading').Thread().join() | __import__('threading').Lock().release() | __import__('concurrent.futures').futures.ThreadPoolExecutor(0) | __import__('multiprocessing').Pool(0) | __import__('signal').signal(99, None)
__import__('contextvars').ContextVar('x').get() | __import__('weakref').ref(5) | __import__('functools').partial(5) | __import__('functools').reduce(lambda a, b: a, []) | __import__('itertools').islice([1], -1) | list(zip([1], [1, 2], strict=True)) | __import__('heapq').heappop([]) | __import__('collections').deque().popleft() | __import__('collections').namedtuple('A', 'class') | __import__('collections').OrderedDict().popitem()
__import__('importlib').import_module('') | __import__('importlib').import_module('.x') | __import__('importlib.metadata').metadata.version('no-such-package') | __import__('importlib').reload(5) | __import__('runpy').run_path('/nonexistent.py') | __import__('inspect').signature(5) | __import__('inspect').getsource(5) | __import__('locale').setlocale(0, 'nothing') | __import__('codecs').lookup('nothing')
__import__('logging').Logger('a').setLevel('LOUD') | __import__('logging').getLogger(5) | __import__('logging.config').config.dictConfig({}) | __import__('shlex').split('"a') | __import__('textwrap').wrap('a', 0) | __import__('typing').get_type_hints(5) | __import__('typing').Union[()] | __import__('typing').Optional[1, 2] | __import__('email').message_from_string(5) | __import__('ctypes').CDLL('libnothing.so')
(lambda f: f(f))(lambda f: f(f)) | [x for x in iter(lambda: 1 / 0, 1)] | dict(a=1).__getitem__('b') | memoryview(5) | range(1, 2, 0) | slice() | round('a') | pow(2, -1, 4) | bin(1.5) | int('9' * 5000) | complex('a') | divmod('a', 1) | enumerate(5) | reversed({1}) | zip(5) | map() | filter(1)
"""  # noqa: E501

TORCH = """
torch.zeros(2, 3) @ torch.zeros(4, 5) | torch.zeros(2) + torch.zeros(3) | torch.zeros(2, 3).view(7) | torch.zeros(2, 3).reshape(4, 2) | torch.cat([torch.zeros(2, 3), torch.zeros(2, 4)]) | torch.stack([torch.zeros(2), torch.zeros(3)]) | torch.cat([])
torch.zeros(3).item() | torch.zeros(3)[5] | torch.zeros(3)[0, 0] | torch.zeros(2, 3).permute(0) | torch.zeros(2, 3).transpose(0, 5) | torch.zeros(2, 3).squeeze(9) | torch.zeros(2, 3).sum(dim=4) | torch.zeros(2).expand(3) | torch.zeros(2, 3).t().view(6)
torch.zeros(2).cuda() | torch.zeros(2, device='cuda') | torch.device('nothing') | torch.device('cuda:x') | torch.zeros(2).to('mps') | torch.zeros(2).to('xla') | torch.cuda.current_device() | torch.cuda.get_device_capability() | torch.cuda.synchronize() | torch.Generator('cuda')
torch.tensor('a') | torch.tensor([1, 'a']) | torch.tensor([[1], [1, 2]]) | torch.tensor(None) | torch.tensor({}) | torch.tensor([1.5], dtype=torch.nothing) | torch.as_tensor(object()) | torch.from_numpy([1]) | torch.frombuffer(b'', dtype=torch.int8) | torch.zeros(-1)
torch.zeros(2, dtype=torch.int64).mean() | torch.zeros(2, dtype=torch.int64).softmax(0) | torch.randperm(-1) | torch.randint(5, 1, (2,)) | torch.arange(1, 5, -1) | torch.linspace(0, 1, -1) | torch.eye(-1) | torch.finfo(torch.int8) | torch.iinfo(torch.float32) | torch.zeros(2).bool() - torch.zeros(2).bool()
torch.multinomial(torch.zeros(3), 1) | torch.multinomial(torch.ones(3), 5) | torch.topk(torch.zeros(3), 5) | torch.gather(torch.zeros(3), 0, torch.tensor([5])) | torch.index_select(torch.zeros(3), 0, torch.tensor([9])) | torch.zeros(3).scatter_(0, torch.tensor([5]), 1.0) | torch.zeros(3).index_add_(0, torch.tensor([0]), torch.zeros(2)) | torch.embedding(torch.zeros(3, 2), torch.tensor([7]))
torch.nn.Linear(3, 4)(torch.zeros(2, 5)) | torch.nn.Linear(-1, 4) | torch.nn.Linear(3, 4)(5) | torch.nn.Linear(3, 4).nothing | torch.nn.Embedding(3, 4)(torch.zeros(2)) | torch.nn.Embedding(3, 4)(torch.tensor([9])) | torch.nn.Conv2d(3, 4, 3)(torch.zeros(1, 2, 8, 8)) | torch.nn.Conv2d(3, 4, 3, groups=2) | torch.nn.LayerNorm(4)(torch.zeros(2, 5)) | torch.nn.MultiheadAttention(7, 2) | torch.nn.Dropout(3) | torch.nn.LSTM(3, 4)(torch.zeros(2, 3, 5)) | torch.nn.BatchNorm1d(3)(torch.zeros(2, 4)) | torch.nn.TransformerEncoderLayer(7, 2)
torch.nn.Linear(3, 4).load_state_dict({}) | torch.nn.Linear(3, 4).load_state_dict({'weight': torch.zeros(2, 2), 'bias': torch.zeros(4)}) | torch.nn.Linear(3, 4).load_state_dict({'weight': torch.zeros(4, 3), 'bias': torch.zeros(4), 'x': 1}) | torch.nn.Linear(3, 4).load_state_dict(5) | torch.nn.Module()(1) | torch.nn.Linear(3, 4).get_submodule('a.b') | torch.nn.Linear(3, 4).get_parameter('nothing') | torch.nn.Module().register_buffer('a.b', None) | torch.nn.Module().register_parameter('x', 5) | torch.nn.Linear(3, 4).register_parameter('weight.x', None) | torch.nn.ModuleList([5]) | torch.nn.ModuleDict({'a.b': torch.nn.Linear(1, 1)}) | torch.nn.Sequential()[0] | torch.nn.ParameterList([1])[4]
torch.zeros(2).backward() | torch.zeros(2, requires_grad=True).backward() | torch.zeros(2, requires_grad=True).numpy() | torch.zeros(2, requires_grad=True).add_(1) | (torch.zeros(1, requires_grad=True) * 2).backward(torch.zeros(3)) | torch.zeros(2, dtype=torch.int32, requires_grad=True) | torch.autograd.grad(torch.zeros(1, requires_grad=True).sum(), torch.zeros(1, requires_grad=True)) | torch.zeros(2, device='meta').numpy() | torch.zeros(2, device='meta').item() | torch.zeros(2, device='meta').tolist() | torch.zeros(2, device='meta').to('cpu') | torch.zeros(1, device='meta') + torch.zeros(3)
torch.load('/nonexistent.pt') | torch.load(io.BytesIO(b'')) | torch.load(io.BytesIO(b'garbage')) | torch.save(lambda: 1, io.BytesIO()) | torch.jit.load('/nonexistent') | torch.jit.script(5) | torch.ops.nothing.thing() | torch.ops.aten.nothing | torch.library.Library('aten', 'DEF') | torch.set_num_threads(0) | torch.set_default_dtype(torch.int8) | torch.set_default_device('nothing') | torch.manual_seed('a') | torch.set_float32_matmul_precision('x')
torch.distributed.get_rank() | torch.distributed.all_reduce(torch.zeros(2)) | torch.distributed.init_process_group('nothing') | torch.distributed.init_process_group('gloo') | torch.distributed.new_group([0]) | torch.distributed.barrier() | torch.utils.data.DataLoader([1], batch_size=0) | torch.utils.data.DataLoader([1], num_workers=-1) | torch.utils.data.random_split([1, 2], [5]) | torch.optim.SGD([], lr=1) | torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=-1) | torch.optim.AdamW([5]) | torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=-1)
torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([5, 0])) | torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(4)) | torch.nn.functional.scaled_dot_product_attention(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)) | torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(4, 5)) | torch.nn.functional.pad(torch.zeros(2), (1,)) | torch.nn.functional.interpolate(torch.zeros(1, 1, 2, 2)) | torch.nn.functional.one_hot(torch.tensor([-1])) | torch.nn.functional.layer_norm(torch.zeros(2), (3,)) | torch.nn.functional.conv1d(torch.zeros(2, 3), torch.zeros(2, 3)) | torch.nn.functional.gelu(torch.zeros(2), approximate='x') | torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int32), torch.zeros(3, 2))
torch.einsum('ij,jk->ik', torch.zeros(2, 3), torch.zeros(4, 5)) | torch.einsum('i->x', torch.zeros(2)) | torch.bmm(torch.zeros(2, 3), torch.zeros(2, 3)) | torch.mm(torch.zeros(2), torch.zeros(2)) | torch.dot(torch.zeros(2), torch.zeros(3)) | torch.linalg.inv(torch.zeros(2, 2)) | torch.linalg.cholesky(-torch.eye(2)) | torch.linalg.solve(torch.zeros(2, 2), torch.zeros(2)) | torch.matmul(torch.zeros(3), torch.zeros(4)) | torch.addmm(torch.zeros(2), torch.zeros(2, 3), torch.zeros(4, 5)) | torch.mm(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float64)) | torch.zeros(2, 2) @ torch.zeros(2, 2, dtype=torch.bfloat16)
torch.zeros(2).resize_(-1) | torch.split(torch.zeros(4), [1, 1]) | torch.chunk(torch.zeros(4), 0) | torch.unbind(torch.tensor(1)) | torch.zeros(4).unflatten(0, (3, 2)) | torch.roll(torch.zeros(4), (1, 2), (0,)) | torch.flip(torch.zeros(4), (3,)) | torch.diag(torch.zeros(1, 2, 3)) | torch.where(torch.zeros(2)) if False else torch.where(5) | torch.clamp(torch.zeros(2)) | torch.zeros(2).normal_(0, -1) | torch.bernoulli(torch.tensor([2.0])) | torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.float32) | bool(torch.zeros(2)) | int(torch.zeros(2)) | len(torch.tensor(1)) | torch.zeros(2)['a'] | torch.zeros(2).foo | torch.nothing | torch.zeros(2).to(5.5) | torch.zeros('a') | torch.zeros(2).view(-1, -1) | torch.histc(torch.zeros(2), bins=-1)
"""  # noqa: E501

TRANSFORMERS = """
transformers.AutoConfig.from_pretrained('/nonexistent/model') | transformers.AutoConfig.from_pretrained('no/such/model/name') | transformers.AutoConfig.from_pretrained(folder({})) | transformers.AutoConfig.from_pretrained(folder({'config.json': '{}'})) | transformers.AutoConfig.from_pretrained(folder({'config.json': '{"model_type": "unheard_of"}'})) | transformers.AutoConfig.from_pretrained(folder({'config.json': 'no json'})) | transformers.AutoConfig.for_model('unheard_of')
transformers.AutoTokenizer.from_pretrained('/nonexistent/model') | transformers.AutoTokenizer.from_pretrained(folder({'config.json': '{"model_type": "llama"}'})) | transformers.AutoTokenizer.from_pretrained(folder({'tokenizer_config.json': '{"tokenizer_class": "NoTokenizer"}'})) | transformers.AutoModelForCausalLM.from_pretrained('/nonexistent/model') | transformers.AutoModelForCausalLM.from_pretrained(folder({'config.json': '{"model_type": "llama"}'})) | transformers.AutoModelForCausalLM.from_pretrained(folder({'config.json': '{"model_type": "vit"}'})) | transformers.AutoModelForCausalLM.from_config(transformers.ViTConfig()) | transformers.AutoProcessor.from_pretrained(folder({})) | transformers.AutoImageProcessor.from_pretrained(folder({})) | transformers.AutoModel() | transformers.AutoTokenizer() | transformers.AutoConfig()
transformers.GenerationConfig.from_pretrained(folder({})) | transformers.GenerationConfig(max_new_tokens=-1).validate() | transformers.GenerationConfig(num_return_sequences=3, num_beams=1).validate() | transformers.GenerationConfig(cache_implementation='nothing').validate() | transformers.GenerationConfig(early_stopping=5).validate() | transformers.BitsAndBytesConfig(load_in_8bit=5) | transformers.BitsAndBytesConfig(load_in_4bit=True, load_in_8bit=True) | transformers.BitsAndBytesConfig(llm_int8_threshold='a') | transformers.GPTQConfig(bits=7) | transformers.AwqConfig(bits=7) | transformers.pipeline('no-such-task') | transformers.pipeline() | transformers.set_seed('a') | transformers.nothing | transformers.TrainingArguments(eval_strategy='nothing', output_dir='/tmp/x') | transformers.TopKLogitsWarper(top_k=-1) | transformers.TopPLogitsWarper(top_p=2.0) | transformers.TemperatureLogitsWarper(temperature=0.0) | transformers.RepetitionPenaltyLogitsProcessor(penalty=-1.0) | transformers.MinLengthLogitsProcessor(-1, 5) | transformers.NoRepeatNGramLogitsProcessor(0) | transformers.LlamaConfig(hidden_size=7, num_attention_heads=2) | transformers.NoBadWordsLogitsProcessor([], 1) | transformers.TypicalLogitsWarper(2.0) | transformers.EpsilonLogitsWarper(2.0) | transformers.SequenceBiasLogitsProcessor(5) | transformers.LlamaConfig(rope_scaling={'type': 'nothing'}) | transformers.StaticCache(config=5) | transformers.HfArgumentParser(5) | transformers.LogitsProcessorList([lambda a: a])(5, 6)
transformers.AutoModelForCausalLM.from_config(tiny, attn_implementation='nothing') | transformers.AutoModelForCausalLM.from_config(tiny, attn_implementation='flash_attention_2') | model().generate() | model().generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2) | model().generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=-3) | model().generate(torch.zeros(1, 2, dtype=torch.long), nothing=3) | model()(torch.zeros(1, 2)) | model()() | model()(torch.full((1, 2), 10**6)) | model().resize_token_embeddings('a') | model().load_adapter('/nonexistent') | model().set_adapter('x') | model().to(torch.int8) | model().save_pretrained(5) | model().push_to_hub('x/y', token='no') if False else model().get_adapter_state_dict() | model().quantize(5)
"""  # noqa: E501

PYDANTIC_TYPES = (
    "int", "float", "bool", "str", "bytes", "list[int]", "dict[str, int]", "set[int]", "tuple[int, int]",
    "Literal['a', 'b']", "Annotated[int, Field(gt=5)]", "Annotated[int, Field(ge=5)]", "Annotated[int, Field(lt=-5)]",
    "Annotated[int, Field(multiple_of=7)]", "Annotated[str, Field(min_length=90)]",
    "Annotated[str, Field(pattern='^z+$')]",
    "Annotated[list, Field(min_length=9)]",
    "datetime.date", "datetime.timedelta", "uuid.UUID", "pathlib.Path", "type[int]",
    "Callable", "int | list[int]", "AnyUrl", "Json", "IPv4Address", "Decimal", "StrictInt", "StrictBool",
)  # fmt: skip
PYDANTIC_VALUES = ("'twelve'", "None", "[1, 'x']", "{'a': 'x'}", "3.5", "object()", "b'\\xff'", "-1")

ARGPARSE = (
    ["--nothing"], ["--port", "x"], ["--port"], ["--mode", "c"], ["--mode"], [], ["m", "extra"], ["m", "--ratio", "x"],
    ["m", "--po", "1", "--pos", "2"], ["m", "--flag=3"], ["m", "--names"], ["m", "--a", "--b"], ["m", "--port=1.5"],
    ["m", "--mode="], ["m", "--pair", "1"], ["m", "-x"], ["m", "--json", "{"], ["m", "--exact", "a"], ["m", "--p", "1"],
    ["m", "--dtype", "float8", "--tensor-parallel-size", "two"], ["m", "--tensor-parallel-size"], ["m", "--dtype"],
)  # fmt: skip


def statements(block: str) -> Iterator[str]:
    for line in block.strip().splitlines():
        yield from (statement.strip() for statement in line.split(" | ") if statement.strip())


def raised(run: Callable[[], Any], what: str) -> dict[str, str] | None:
    """Class and message of what `run` raises."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            run()
    except (Exception, SystemExit) as error:
        kind = type(error)
        name = (
            kind.__qualname__
            if kind.__module__ in ("builtins", "__main__")
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        return {"error_class": name, "message": str(error)}
    print(f"raises nothing here: {what}", file=sys.stderr)
    return None


def made(owner: str, block: str, names: dict[str, Any]) -> Iterator[dict[str, str]]:
    for statement in statements(block):
        error = raised(functools.partial(exec, statement, dict(names)), statement)
        if error:
            yield {"owner": owner} | error


def pydantic_errors() -> Iterator[dict[str, str]]:
    import datetime
    import pathlib
    import typing
    import uuid
    from decimal import Decimal
    from ipaddress import IPv4Address

    import pydantic
    from pydantic import ValidationError, create_model

    names: dict[str, Any] = {"datetime": datetime, "pathlib": pathlib, "uuid": uuid, "Callable": Callable}
    names |= {"Decimal": Decimal, "IPv4Address": IPv4Address, "Literal": typing.Literal, "Annotated": typing.Annotated}
    names |= {name: getattr(pydantic, name) for name in ("Field", "AnyUrl", "Json", "StrictInt", "StrictBool")}
    for kind in PYDANTIC_TYPES:
        model = create_model("EngineConfig", setting=(eval(kind, names), ...))
        for value in PYDANTIC_VALUES:
            try:
                model(setting=eval(value))
            except ValidationError as error:
                yield {
                    "owner": "pydantic",
                    "error_class": "pydantic_core._pydantic_core.ValidationError",
                    "message": str(error),
                }


def argparse_errors() -> Iterator[dict[str, str]]:
    import argparse

    parser = argparse.ArgumentParser(prog="serve", exit_on_error=True)
    parser.add_argument("model")
    for flag, options in {
        "--port": {"type": int},
        "--pos": {"type": int},
        "--mode": {"choices": ["a", "b"]},
        "--ratio": {"type": float},
        "--flag": {"action": "store_true"},
        "--names": {"nargs": "+"},
        "--pair": {"nargs": 2},
        "--json": {"type": json.loads},
        "--exact": {"type": int, "nargs": "*"},
        "--dtype": {"choices": ["auto", "half", "bfloat16"]},
        "--tensor-parallel-size": {"type": int},
    }.items():
        parser.add_argument(flag, **options)  # type: ignore[arg-type]
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--a", action="store_true")
    group.add_argument("--b", action="store_true")
    for arguments in ARGPARSE:
        words = io.StringIO()
        with contextlib.redirect_stderr(words), contextlib.suppress(SystemExit):
            parser.parse_args(arguments)
            raise AssertionError(f"this raises nothing: {arguments}")
        yield {"owner": "argparse", "error_class": "", "message": words.getvalue().strip().splitlines()[-1]}


def folder(files: dict[str, str]) -> str:
    import tempfile
    from pathlib import Path

    made = Path(tempfile.mkdtemp())
    for name, text in files.items():
        (made / name).write_text(text)
    return str(made)


def every_error() -> Iterator[dict[str, str]]:
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    yield from made("Python", PYTHON, {})
    yield from pydantic_errors()
    yield from argparse_errors()
    import torch

    yield from made("torch", TORCH, {"torch": torch, "io": io})
    import transformers

    transformers.logging.set_verbosity_error()
    tiny = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16
    )
    names = {
        "torch": torch,
        "transformers": transformers,
        "folder": folder,
        "tiny": tiny,
        "model": lambda: transformers.AutoModelForCausalLM.from_config(tiny),
    }
    yield from made("transformers", TRANSFORMERS, names)


if __name__ == "__main__":
    for each in every_error():
        print(json.dumps(each))
        sys.stdout.flush()
