//! Rows that another process reads.

use std::sync::{Arc, Mutex};

use super::*;
use crate::{DataError, RowPlace, RowReader, TokenBatch, TokenRows};

/// Reads the rows itself, and checks that the expected next rows come next.
#[derive(Debug)]
struct Reader {
    rows: TokenRows,
    next: Mutex<Vec<RowPlace>>,
}

impl RowReader for Reader {
    fn batch(&self, places: &[RowPlace], next: &[RowPlace]) -> Result<TokenBatch, DataError> {
        let mut expected = self.next.lock().expect("one thread");
        assert!(expected.is_empty() || *expected == places, "{expected:?}");
        *expected = next.to_vec();
        assert!(self.rows.has_places(places));
        self.rows.batch(places)
    }
}

fn check(config: &DataConfig, share: Option<f64>) {
    let rows = config.open(256, 1).expect("the data is good");
    let parts = match share {
        Some(share) => <[TokenRows; 2]>::from(rows.hold_out(share).expect("both parts have rows")).to_vec(),
        None => vec![rows],
    };
    for mut rows in parts {
        let outline = serde_json::to_string(&rows.outline().expect("readable")).expect("plain data");
        let reader = Arc::new(Reader { rows: rows.clone(), next: Mutex::default() });
        let outline = serde_json::from_str(&outline).expect("the same");
        let mut remote = TokenRows::remote(outline, config, reader);
        let figures = |rows: &TokenRows| {
            let entropy = rows.frequency_entropy().expect("known").to_bits();
            (rows.identity().expect("known"), entropy, rows.counted_targets().expect("known"), rows.mixture())
        };
        assert_eq!(figures(&remote), figures(&rows));
        for _ in 0..2 * rows.rows() {
            assert_eq!(remote.next_batch(1).expect("rows"), rows.next_batch(1).expect("rows"));
            assert_eq!((remote.cursor(), remote.given_rows()), (rows.cursor(), rows.given_rows()));
        }
        assert!(!rows.has_places(&[RowPlace::new(0, rows.rows())]));
        assert!(remote.hold_out(0.5).is_err(), "the ids are elsewhere");
    }
}

#[test]
fn remote_rows_are_the_rows_of_the_other_process() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("the scratch folder takes files");
        path.display().to_string()
    };
    let text = write("a.txt", "to be or not to be, that is the question");
    let chats = write(
        "b.jsonl",
        "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"prompt\":\"e\",\"completion\":\"fgh\"}\n",
    );
    let other = write("c.txt", "whether 'tis nobler in the mind to suffer");
    let config = DataConfig { seq_len: 6, shuffle: true, seed: 3, ..DataConfig::default() };
    let of = |path: &str| DataConfig { path: vec![path.to_owned()], ..config.clone() };
    check(&of(&text), None);
    check(&of(&text), Some(0.4));
    check(&of(&chats), None);
    let source = |path: &String, weight: f64| crate::MixSource {
        path: vec![path.clone()],
        weight: weight.try_into().expect("above 0"),
    };
    let mix = DataConfig { mix: vec![source(&text, 0.7), source(&other, 0.3)], path: Vec::new(), ..config };
    check(&mix, None);
    check(&mix, Some(0.4));
}
