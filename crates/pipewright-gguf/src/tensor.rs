//! The tensors of a GGUF file: their element types, shapes and places.

use pipewright_kernel::quantised::BlockKind;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// 32 bits.
    F32,
    /// 16 bits, up to 65504.
    F16,
    /// 16 bits with the range of 32.
    Bf16,
    /// Blocks of quantised elements.
    Blocks(BlockKind),
}

/// The types with their numbers and names in GGUF.
const KINDS: [(u32, &str, TensorKind); 11] = [
    (0, "F32", TensorKind::F32),
    (1, "F16", TensorKind::F16),
    (2, "Q4_0", TensorKind::Blocks(BlockKind::Q4_0)),
    (3, "Q4_1", TensorKind::Blocks(BlockKind::Q4_1)),
    (6, "Q5_0", TensorKind::Blocks(BlockKind::Q5_0)),
    (7, "Q5_1", TensorKind::Blocks(BlockKind::Q5_1)),
    (8, "Q8_0", TensorKind::Blocks(BlockKind::Q8_0)),
    (12, "Q4_K", TensorKind::Blocks(BlockKind::Q4K)),
    (13, "Q5_K", TensorKind::Blocks(BlockKind::Q5K)),
    (14, "Q6_K", TensorKind::Blocks(BlockKind::Q6K)),
    (30, "BF16", TensorKind::Bf16),
];

impl TensorKind {
    /// Returns the type with a number.
    pub(crate) fn of_number(number: u32) -> Option<Self> {
        KINDS.iter().find(|(own, ..)| *own == number).map(|(.., kind)| *kind)
    }

    /// Returns the number of the type.
    pub(crate) fn number(self) -> u32 {
        KINDS.iter().find(|(.., kind)| *kind == self).map_or(0, |(number, ..)| *number)
    }

    /// Returns the names of all types.
    pub(crate) fn names() -> String {
        KINDS.map(|(_, name, _)| name).join(", ")
    }

    /// Returns the elements and the bytes of a block.
    pub fn block(self) -> [usize; 2] {
        match self {
            Self::F32 => [1, 4],
            Self::F16 | Self::Bf16 => [1, 2],
            Self::Blocks(kind) => [kind.elements(), kind.bytes()],
        }
    }

    /// Returns the bytes of a tensor of this shape.
    pub fn bytes(self, shape: &[usize]) -> u64 {
        let [elements, bytes] = self.block();
        shape.iter().product::<usize>() as u64 / elements as u64 * bytes as u64
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The name in the file.
    pub name: String,
    /// The element type.
    pub kind: TensorKind,
    /// The sizes; the last one is of neighbouring elements.
    pub shape: Vec<usize>,
    /// The position of the first byte in the file.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
}
