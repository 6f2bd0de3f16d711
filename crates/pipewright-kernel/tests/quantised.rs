//! Quantised matrices: elements against their definition, products against products with the decoded matrix,
//! and parts against the whole.

use half::bf16;
use pipewright_kernel::bf16_product::testing::run_without_instruction;
use pipewright_kernel::grouped::{ExpertMatrix, Groups};
use pipewright_kernel::half::Half;
use pipewright_kernel::product::Matrix;
use pipewright_kernel::quantised::block_codes::quantise;
use pipewright_kernel::quantised::{
    BlockKind, Blocks, Codebook, CodebookError, DoubleScales, Form, Fp8, Grouped, QuantisedMatrix,
    QuantisedOperand, Rounding, Scales, row_product,
};
use pipewright_kernel::quantised_product::{half_product, half_product_with_update, product};
use pipewright_kernel::{bf16_product, product as single};

/// Returns `count` bytes in no order.
fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..count).map(|_| next()).collect()
}

/// Returns `count` numbers from -1 to 1 that fill their mantissas.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let words = bytes(4 * count, seed);
    words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word) as f32 / 2e9 - 1.07).collect()
}

fn table() -> [f32; 16] {
    numbers(16, 7).try_into().expect("sixteen")
}

/// Returns the bytes, scales and elements of a matrix.
fn codebook([rows, columns]: [usize; 2], block: usize, is_double: bool) -> (QuantisedMatrix, Vec<f32>) {
    let elements = rows * columns;
    let (codes, blocks) = (bytes(elements.div_ceil(2), 3), elements.div_ceil(block));
    let (scales, values): (Scales, Vec<f32>) = if is_double {
        let map: Box<[f32; 256]> = Box::new(numbers(256, 9).try_into().expect("256"));
        let (of_blocks, scales, offset) = (bytes(blocks, 5), numbers(blocks.div_ceil(4), 6), 0.125);
        let value = |(index, &code): (usize, &u8)| map[usize::from(code)] * scales[index / 4] + offset;
        let values = of_blocks.iter().enumerate().map(value).collect();
        let scales = DoubleScales {
            codes: of_blocks,
            map: map.clone(),
            scales: scales.clone(),
            block: 4,
            offset,
            first: 0,
        };
        (Scales::Double(scales), values)
    } else {
        (Scales::Single(numbers(blocks, 4)), numbers(blocks, 4))
    };
    let element = |index: usize| {
        let byte = codes[index / 2];
        let half = if index.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
        table()[usize::from(half)] * values[index / block]
    };
    let expected = (0..elements).map(element).collect();
    let codebook = Codebook::new([rows, columns], codes, table(), scales, block).expect("a matrix");
    (QuantisedMatrix::new(rows, Form::Codebook(codebook)), expected)
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Checks elements, products and parts of a matrix.
fn check(matrix: &QuantisedMatrix, expected: &[f32]) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert_eq!(bits(&matrix.decoded()), bits(expected), "{rows} {columns}");
    for tokens in [1, 2, 5, 37] {
        check_products(matrix, expected, tokens);
    }
    let middle = (rows / 3..rows.div_ceil(2), columns / 4..columns - columns / 5);
    for (of_rows, of_columns) in
        [(0..rows, 0..columns), (rows / 2..rows, 0..columns), (0..rows, 0..columns / 2), middle]
    {
        let Ok(part) = matrix.part(of_rows.clone(), of_columns.clone()) else { continue };
        let inside = of_rows.clone().flat_map(|row| expected[row * columns..][of_columns.clone()].to_vec());
        let inside: Vec<f32> = inside.collect();
        assert_eq!(bits(&part.decoded()), bits(&inside), "{of_rows:?} {of_columns:?}");
        for tokens in [1, 5] {
            check_products(&part, &inside, tokens);
        }
        let (half, third) = (part.rows() / 2, part.columns() / 3);
        if let Ok(again) = part.part(half..part.rows(), third..part.columns()) {
            let inside = (of_rows.start + half..of_rows.end)
                .flat_map(|row| expected[row * columns..][of_columns.start + third..of_columns.end].to_vec());
            assert_eq!(bits(&again.decoded()), bits(&inside.collect::<Vec<_>>()), "a part of a part");
        }
    }
}

fn check_products(matrix: &QuantisedMatrix, expected: &[f32], tokens: usize) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let decoded = Matrix::new(expected, rows, columns);
    let half_decoded = bf16::narrowed(expected);
    let half_decoded = Matrix::new(&half_decoded, rows, columns);
    for is_forward in [true, false] {
        let (inner, outer) = if is_forward { (columns, rows) } else { (rows, columns) };
        let operand =
            if is_forward { QuantisedOperand::transposed(matrix) } else { QuantisedOperand::plain(matrix) };
        let left = numbers(tokens * inner, 1);
        let left_half = bf16::narrowed(&left);
        let left_numbers = &left[..];
        let (left, left_half) = (Matrix::new(&left, tokens, inner), Matrix::new(&left_half, tokens, inner));
        let right = if is_forward { decoded.transposed() } else { decoded };
        let whole = single::product(left, right);
        let what = format!("{tokens} tokens, {rows} x {columns}, forward: {is_forward}");
        assert_eq!(bits(&product(left, operand, Rounding::None)), bits(&whole), "{what}");
        if tokens == 1 && is_forward {
            let found = row_product(matrix, left_numbers);
            let largest = whole.iter().fold(1f32, |largest, x| largest.max(x.abs()));
            let is_near = |(found, whole): (&f32, &f32)| (found - whole).abs() < 1e-5 * largest;
            assert!(found.iter().zip(&whole).all(is_near), "{what}: {found:?} {whole:?}");
        }
        check_group(matrix, expected, left_numbers, is_forward);

        let right = if is_forward { half_decoded.transposed() } else { half_decoded };
        assert_eq!(half_product(left_half, operand), bf16_product::product(left_half, right), "{what}");
        let (low, matrix) = (numbers(tokens * 3, 2), numbers(3 * outer, 8));
        let found = half_product_with_update(left_half, operand, [&low, &matrix], 3);
        assert_eq!(found, bf16_product::product_with_update(left_half, right, [&low, &matrix], 3), "{what}");
    }
}

/// Checks products of a group of rows, which has the bits of a product with the decoded matrix as linear layers hold it.
fn check_group(matrix: &QuantisedMatrix, expected: &[f32], left: &[f32], is_forward: bool) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let turned: Vec<f32> = (0..rows * columns).map(|i| expected[i % rows * columns + i / rows]).collect();
    let size = if is_forward { [columns, rows] } else { [rows, columns] };
    let tokens = left.len() / size[0];
    let groups = Groups::of_sizes([0, tokens]);
    let held = [&[], &*turned].map(ExpertMatrix::Held);
    let quantised = [matrix; 2].map(|matrix| ExpertMatrix::Quantised(matrix, Rounding::None));
    let sums = numbers(tokens * size[1], 5);
    let added = |matrices| {
        let mut out = sums.clone();
        groups.add_product(&mut out, left, matrices, size, !is_forward);
        bits(&out)
    };
    let what = format!("{tokens} tokens, {rows} x {columns}, forward: {is_forward}");
    assert_eq!(added(quantised), added(held), "{what}");
    let [found, whole] = [quantised, held].map(|of| groups.product(left, of, size, !is_forward));
    assert_eq!(bits(&found), bits(&whole), "{what}");
    let half_turned = bf16::narrowed(&turned);
    let held = [&[], &*half_turned].map(ExpertMatrix::Held);
    let quantised = [matrix; 2].map(|matrix| ExpertMatrix::Quantised(matrix, Rounding::Bf16));
    let left = bf16::narrowed(left);
    let [found, whole] = [quantised, held].map(|of| {
        let mut out = sums.clone();
        groups.add_product(&mut out, &left, of, size, !is_forward);
        (
            bits(&out),
            bits(&groups.product(&left, of, size, !is_forward)),
            groups.rounded_product(&left, of, size, !is_forward),
        )
    });
    assert!(found == whole, "{what}, in bfloat16");
}

/// MXFP4: the numbers of E2M1, and powers of two from the smallest exponent on.
#[test]
fn scales_may_be_powers_of_two() {
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let table: [f32; 16] = std::array::from_fn(|code| if code < 8 { table[code] } else { -table[code - 8] });
    let (codes, exponents) = (bytes(3 * 48, 3), vec![0, 1, 127, 120, 128, 100, 90, 130, 126]);
    let scale = |index: usize| 2f64.powi(i32::from(exponents[index / 32]) - 127);
    let element = |index: usize| {
        let byte = codes[index / 2];
        let half = if index.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
        (f64::from(table[usize::from(half)]) * scale(index)) as f32
    };
    let expected: Vec<f32> = (0..3 * 96).map(element).collect();
    let new = |exponents| Codebook::new([3, 96], codes.clone(), table, Scales::Exponents(exponents), 32);
    let matrix = QuantisedMatrix::new(3, Form::Codebook(new(exponents.clone()).expect("a matrix")));
    check(&matrix, &expected);
    assert_eq!(matrix.bytes(), 3 * 48 + 9);
    assert_eq!(matrix.part(1..3, 32..64).expect("a part").bytes(), 2 * 16 + 2);
    let gathered = matrix.gathered(&[2, 0]).expect("rows");
    assert_eq!(bits(&gathered.decoded()), bits(&[&expected[192..], &expected[..96]].concat()));
    assert_eq!(gathered.bytes(), 2 * (48 + 3));
    assert_eq!(new([255; 9].to_vec()), Err(CodebookError::NotFinite));
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn products_have_the_bits_of_those_with_the_decoded_matrix() {
    for (shape, block) in [
        ([40, 64], 64),
        ([33, 176], 64),
        ([130, 70], 32),
        ([7, 9], 4),
        ([300, 320], 128),
        ([3, 4500], 64),
        ([150, 4800], 32),
        ([1, 5], 8),
    ] {
        for is_double in [false, true] {
            let (matrix, expected) = codebook(shape, block, is_double);
            check(&matrix, &expected);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri starts no processes")]
fn all_without_the_instruction() {
    run_without_instruction("_have_the_bits");
}

/// Several panels, and threads.
#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn wide_matrices_have_the_same_bits() {
    let (matrix, expected) = codebook([1025, 2048], 64, true);
    check_products(&matrix, &expected, 65);
}

#[test]
fn sums_of_subnormal_products_are_rounded_as_numbers() {
    let codes = bytes(64, 1);
    let scales = Scales::Single(vec![1e-38, 3e-39]);
    let book = Codebook::new([2, 64], codes, table(), scales, 64).expect("a matrix");
    let matrix = QuantisedMatrix::new(2, Form::Codebook(book));
    let expected = bf16::narrowed(&matrix.decoded());
    let one = bf16::narrowed(&[1.0, 0.0, 0.0, 1.0]);
    let found = half_product(Matrix::new(&one, 2, 2), QuantisedOperand::plain(&matrix));
    assert_eq!(found, bf16_product::product(Matrix::new(&one, 2, 2), Matrix::new(&expected, 2, 64)));
}

#[test]
fn matrices_whose_parts_do_not_fit_are_refused() {
    let new =
        |codes, scales, block| Codebook::new([3, 5], vec![0; codes], table(), Scales::Single(scales), block);
    assert!(new(8, vec![1.0; 4], 4).is_ok());
    assert_eq!(new(7, vec![1.0; 4], 4), Err(CodebookError::Codes { needed: 8 }));
    assert_eq!(new(8, vec![1.0; 3], 4), Err(CodebookError::Scales { needed: 4 }));
    assert_eq!(new(8, vec![1.0; 4], 0), Err(CodebookError::Block));
    assert_eq!(new(8, vec![1.0, 1.0, f32::NAN, 1.0], 4), Err(CodebookError::NotFinite));
    let double = |scales: Vec<f32>, offset| {
        let double =
            DoubleScales { codes: vec![0; 4], map: Box::new([0.5; 256]), scales, block: 3, offset, first: 0 };
        Codebook::new([3, 5], vec![0; 8], table(), Scales::Double(double), 4)
    };
    assert!(double(vec![1.0; 2], 0.0).is_ok());
    assert_eq!(double(vec![1.0; 3], 0.0), Err(CodebookError::ScalesOfScales { needed: 2 }));
    assert_eq!(double(vec![1.0; 2], f32::INFINITY), Err(CodebookError::NotFinite));
}

#[test]
fn a_matrix_needs_the_bytes_of_its_parts() {
    assert_eq!(codebook([8, 64], 64, false).0.bytes(), 8 * 32 + 4 * 8);
    assert_eq!(codebook([8, 64], 64, true).0.bytes(), 8 * 32 + 8 + 4 * (2 + 256));
}

/// Returns the number that a code of FP8 means, from its fields.
fn number_of(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let number =
        if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if code >> 7 == 1 { -number } else { number }
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn matrices_of_eight_bits() {
    for ([rows, columns], block) in [
        ([40, 64], [16, 32]),
        ([33, 176], [128, 128]),
        ([130, 70], [8, 64]),
        ([7, 9], [2, 4]),
        ([300, 320], [128, 128]),
    ] {
        let codes: Vec<u8> = bytes(rows * columns, 3).into_iter().map(|code| code & !4).collect();
        let across = columns.div_ceil(block[1]);
        let scales = numbers(rows.div_ceil(block[0]) * across, 4);
        let element = |index: usize| {
            let (row, column) = (index / columns, index % columns);
            number_of(codes[index]) * scales[row / block[0] * across + column / block[1]]
        };
        let expected: Vec<f32> = (0..rows * columns).map(element).collect();
        let fp8 = Fp8::new([rows, columns], codes.clone(), scales.clone(), block).expect("a matrix");
        let matrix = QuantisedMatrix::new(rows, Form::Fp8(fp8));
        check(&matrix, &expected);
        let order: Vec<usize> = (0..rows).map(|row| row * 7 % rows).collect();
        let gathered = matrix.gathered(&order).expect("rows").decoded();
        let inside = order.iter().flat_map(|row| expected[row * columns..][..columns].to_vec());
        assert_eq!(bits(&gathered), bits(&inside.collect::<Vec<_>>()));
    }
    let new = |codes: &[u8], scales: &[f32]| Fp8::new([1, 3], codes.to_vec(), scales.to_vec(), [1, 2]);
    assert!(new(&[1, 2, 3], &[1.0, 2.0]).is_ok());
    assert_eq!(new(&[1, 2], &[1.0, 2.0]), Err(CodebookError::Codes { needed: 3 }));
    assert_eq!(new(&[1, 2, 3], &[1.0]), Err(CodebookError::Scales { needed: 2 }));
    assert_eq!(new(&[1, 0xff, 3], &[1.0, 1.0]), Err(CodebookError::NotFinite));
    assert_eq!(new(&[1, 2, 3], &[1.0, f32::NAN]), Err(CodebookError::NotFinite));
}

#[test]
fn rows_of_four_bits_are_gathered() {
    for is_double in [false, true] {
        let (matrix, expected) = codebook([9, 64], 32, is_double);
        let order = [3, 0, 8, 8];
        let gathered = matrix.gathered(&order).expect("rows are whole blocks").decoded();
        let inside = order.iter().flat_map(|row| expected[row * 64..][..64].to_vec());
        assert_eq!(bits(&gathered), bits(&inside.collect::<Vec<_>>()));
        assert!(
            codebook([9, 40], 32, is_double).0.gathered(&order).is_err(),
            "a block has elements of two rows"
        );
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn matrices_in_groups() {
    let cases: [([usize; 2], usize); 6] =
        [([40, 64], 32), ([33, 176], 128), ([130, 70], 8), ([7, 9], 4), ([300, 320], 128), ([5, 64], 64)];
    for ([rows, columns], group) in cases {
        let across = columns.div_ceil(group);
        let (codes, zeros) = (bytes(rows * columns.div_ceil(2), 3), bytes(rows * across, 5));
        let zeros: Vec<u8> = zeros.into_iter().map(|zero| zero % 16).collect();
        let scales = numbers(rows * across, 4);
        let element = |index: usize| {
            let (row, column) = (index / columns, index % columns);
            let byte = codes[row * columns.div_ceil(2) + column / 2];
            let code = if column.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
            let group = row * across + column / group;
            (f32::from(code) - f32::from(zeros[group])) * scales[group]
        };
        let expected: Vec<f32> = (0..rows * columns).map(element).collect();
        let grouped = Grouped::new([rows, columns], codes.clone(), zeros.clone(), scales.clone(), group);
        let matrix = QuantisedMatrix::new(rows, Form::Grouped(grouped.expect("a matrix")));
        check(&matrix, &expected);
        let order: Vec<usize> = (0..rows).map(|row| row * 7 % rows).collect();
        let gathered = matrix.gathered(&order).expect("rows").decoded();
        let inside = order.iter().flat_map(|row| expected[row * columns..][..columns].to_vec());
        assert_eq!(bits(&gathered), bits(&inside.collect::<Vec<_>>()));
    }
    let new = |codes: usize, zeros: &[u8], scales: &[f32]| {
        Grouped::new([1, 3], vec![0; codes], zeros.to_vec(), scales.to_vec(), 2)
    };
    assert!(new(2, &[0, 15], &[1.0, 2.0]).is_ok());
    assert_eq!(new(3, &[0, 15], &[1.0, 2.0]), Err(CodebookError::Codes { needed: 2 }));
    assert_eq!(new(2, &[0], &[1.0, 2.0]), Err(CodebookError::Scales { needed: 2 }));
    assert_eq!(new(2, &[0, 16], &[1.0, 2.0]), Err(CodebookError::NotFinite));
    assert_eq!(new(2, &[0, 1], &[1.0, f32::NAN]), Err(CodebookError::NotFinite));
}

/// The forms of blocks, with the files in `data/gguf` that `make_blocks.py` has made with gguf-py.
const BLOCKS: [(BlockKind, &[u8]); 8] = [
    (BlockKind::Q4_0, include_bytes!("data/gguf/q4_0.bin")),
    (BlockKind::Q4_1, include_bytes!("data/gguf/q4_1.bin")),
    (BlockKind::Q5_0, include_bytes!("data/gguf/q5_0.bin")),
    (BlockKind::Q5_1, include_bytes!("data/gguf/q5_1.bin")),
    (BlockKind::Q8_0, include_bytes!("data/gguf/q8_0.bin")),
    (BlockKind::Q4K, include_bytes!("data/gguf/q4_k.bin")),
    (BlockKind::Q5K, include_bytes!("data/gguf/q5_k.bin")),
    (BlockKind::Q6K, include_bytes!("data/gguf/q6_k.bin")),
];

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect()
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn blocks_have_the_elements_that_gguf_py_decodes() {
    for (kind, golden) in BLOCKS {
        let (blocks, expected) = golden.split_at(1536 / kind.elements() * kind.bytes());
        let expected = floats(expected);
        assert_eq!(expected.len(), 1536);
        for shape in [[3, 512], [1, 1536], [6, 256]] {
            let matrix = Blocks::new(kind, shape, blocks.to_vec()).expect("a matrix");
            let matrix = QuantisedMatrix::new(shape[0], Form::Blocks(matrix));
            check(&matrix, &expected);
            let order: Vec<usize> = (0..shape[0]).rev().collect();
            let gathered = matrix.gathered(&order).expect("rows").decoded();
            let inside = order.iter().flat_map(|row| expected[row * shape[1]..][..shape[1]].to_vec());
            assert_eq!(bits(&gathered), bits(&inside.collect::<Vec<_>>()));
        }
        // A number of products that fill several panels.
        let many: Vec<u8> = blocks.iter().cycle().take(100 * blocks.len()).copied().collect();
        let expected: Vec<f32> = expected.iter().cycle().take(153_600).copied().collect();
        let matrix = Blocks::new(kind, [300, 512], many).expect("a matrix");
        check_products(&QuantisedMatrix::new(300, Form::Blocks(matrix)), &expected, 3);

        let new = |shape, bytes: &[u8]| Blocks::new(kind, shape, bytes.to_vec()).expect_err("it is refused");
        let needed = blocks.len();
        assert_eq!(new([3, 512], &blocks[1..]), CodebookError::Codes { needed });
        assert_eq!(new([1, 16], &[]), CodebookError::Columns { block: kind.elements() });
        let mut spoiled = blocks.to_vec();
        let place = if kind == BlockKind::Q6K { 208 } else { 0 };
        spoiled[place..place + 2].copy_from_slice(&[0, 0x7c]);
        assert_eq!(new([3, 512], &spoiled), CodebookError::NotFinite);
    }
}

/// Each 512 elements are a sum in sixteen lanes, which are added pairwise.
#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn row_products_of_blocks_have_the_bits_of_their_definition() {
    let sum = |(elements, x): (&[f32], &[f32])| {
        let mut lanes = [0f32; 16];
        for (index, (element, x)) in elements.iter().zip(x).enumerate() {
            lanes[index % 16] += element * x;
        }
        for width in [8, 4, 2, 1] {
            (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
        }
        lanes[0]
    };
    for (kind, golden) in BLOCKS {
        let (blocks, elements) = golden.split_at(1536 / kind.elements() * kind.bytes());
        let elements = floats(elements);
        // Rows of a part of 512 elements, of whole parts, and for short blocks of half a step.
        for [rows, columns] in [[6, 256], [3, 512], [1, 1536], [2, 768], [16, 96], [24, 64], [48, 32]] {
            if columns % kind.elements() != 0 {
                continue;
            }
            let matrix = Blocks::new(kind, [rows, columns], blocks.to_vec()).expect("a matrix");
            let matrix = QuantisedMatrix::new(rows, Form::Blocks(matrix));
            let x = numbers(columns, 3);
            let defined =
                elements.chunks(columns).map(|row| row.chunks(512).zip(x.chunks(512)).map(sum).sum());
            let defined: Vec<f32> = defined.collect();
            assert_eq!(bits(&row_product(&matrix, &x)), bits(&defined), "{kind:?}, {rows} x {columns}");
        }
    }
}

#[test]
fn eight_bits_are_those_of_gguf_py() {
    let (elements, blocks) = include_bytes!("data/gguf/q8_0_from.bin").split_at(4096);
    let found = quantise(BlockKind::Q8_0, &floats(elements), [4, 256]).expect("a matrix");
    assert_eq!(found.storage(), blocks);
}

/// The relative errors of normal elements. The bounds of Q4_K and Q6_K are the errors of the same forms with the
/// widths of the codes from the least and the largest element alone.
#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn the_search_for_scales_is_better_than_the_ends_of_the_elements() {
    // Sums of twelve uniform numbers.
    let uniform = numbers(12 * 65_536, 11);
    let elements: Vec<f32> = uniform.chunks(12).map(|twelve| twelve.iter().sum()).collect();
    let error = |decoded: &[f32]| {
        let squares: f64 = elements.iter().zip(decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        (squares / elements.iter().map(|element| f64::from(*element).powi(2)).sum::<f64>()).sqrt()
    };
    let found = |kind| {
        let blocks = quantise(kind, &elements, [256, 256]).expect("a matrix");
        error(&QuantisedMatrix::new(256, Form::Blocks(blocks)).decoded())
    };
    let plain = |size: usize, codes: f32, is_symmetric: bool| {
        let unit = |unit: &[f32]| {
            let (least, largest) = unit.iter().fold((0f32, 0f32), |(a, b), x| (a.min(*x), b.max(*x)));
            let (start, width) = if is_symmetric {
                let largest = largest.max(-least);
                (0.0, largest / codes)
            } else {
                (least, (largest - least) / codes)
            };
            unit.iter().map(|x| ((x - start) / width).round() * width + start).collect::<Vec<f32>>()
        };
        error(&elements.chunks(size).flat_map(unit).collect::<Vec<f32>>())
    };
    let (four, six, eight) = (found(BlockKind::Q4K), found(BlockKind::Q6K), found(BlockKind::Q8_0));
    assert!(four < plain(32, 15.0, false) && four < 0.08, "{four}");
    assert!(six < plain(16, 31.0, true) && six < 0.02, "{six}");
    assert!(eight < 0.006, "{eight}");
    for spoiled in [f32::NAN, f32::INFINITY, 1e38] {
        let mut elements = elements[..256].to_vec();
        elements[3] = spoiled;
        for kind in [BlockKind::Q8_0, BlockKind::Q4K, BlockKind::Q6K] {
            assert_eq!(quantise(kind, &elements, [1, 256]), Err(CodebookError::NotFinite));
        }
    }
}

/// Prints the rate at which products of a row read quantised matrices, next to the rate at which memory is read.
#[test]
#[ignore = "measures, and tests nothing"]
#[expect(clippy::print_stdout, reason = "a measurement prints its figures")]
fn rates_of_row_products() {
    use std::time::Instant;

    use rayon::ThreadPoolBuilder;
    use rayon::prelude::*;

    use pipewright_kernel::squares::sum_squares;

    const SIZE: [usize; 2] = [11008, 4096];
    let of_blocks = SIZE[0] * SIZE[1] / 64;
    let matrix = |seed| {
        let scales = DoubleScales {
            codes: bytes(of_blocks, seed),
            map: Box::new(numbers(256, 9).try_into().expect("256")),
            scales: numbers(of_blocks.div_ceil(256), 6),
            block: 256,
            offset: 0.125,
            first: 0,
        };
        let codes = bytes(SIZE[0] * SIZE[1] / 2, seed);
        let codebook = Codebook::new(SIZE, codes, table(), Scales::Double(scales), 64).expect("a matrix");
        QuantisedMatrix::new(SIZE[0], Form::Codebook(codebook))
    };
    let matrices: Vec<QuantisedMatrix> = (1..12).map(matrix).collect();
    let held: usize = matrices.iter().map(QuantisedMatrix::bytes).sum();
    let memory = vec![1f32; 64 << 20];
    let x = numbers(SIZE[1], 1);
    for threads in [1, 2] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        let best = |bytes: usize, read: &(dyn Fn() + Sync)| {
            let time = || {
                let start = Instant::now();
                pool.install(read);
                start.elapsed().as_secs_f64()
            };
            bytes as f64 / (0..7).map(|_| time()).fold(f64::INFINITY, f64::min) / 1e9
        };
        let sum = || {
            let parts = memory.par_chunks(1 << 20).map(sum_squares);
            assert_eq!(parts.sum::<f64>(), memory.len() as f64);
        };
        let products =
            || matrices.iter().for_each(|matrix| assert_eq!(row_product(matrix, &x).len(), SIZE[0]));
        let [memory, products] = [best(4 * memory.len(), &sum), best(held, &products)];
        println!(
            "{threads} threads: memory {memory:.1} GB/s, products {products:.1} GB/s, {:.2}",
            products / memory
        );
    }
}
