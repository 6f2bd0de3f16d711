//! The names of actions in pictures: their text form, with slices named by their microbatch.

use std::fmt;

use crate::action::Action;
use crate::slices::Slices;

/// The name of an action. If microbatches are cut into slices, it ends with the microbatch and the slice:
/// `0F3.1`.
#[derive(Clone, Copy)]
pub(super) struct Named(pub(super) Action, pub(super) Slices);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(action, slices) = *self;
        match (action, action.microbatch()) {
            (Action::Overlap(_), _) => {
                let parts: Vec<String> = action.parts().map(|part| Self(part, slices).to_string()).collect();
                write!(f, "({}){}", parts.join(";"), action.kind())
            }
            (_, Some(number)) => write!(f, "{}{}{}", action.stage(), action.kind(), slices.name(number)),
            (_, None) => action.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(action: &str, slices: u32, expected: &str) {
        let slices = Slices::new(slices).expect("not 0");
        assert_eq!(Named(action.parse().expect(action), slices).to_string(), expected);
    }

    #[test]
    fn a_whole_microbatch_has_its_text_form() {
        for action in ["2F7", "0UNSHARD", "1SEND_F3", "(0F7;7B3)OVERLAP_F_B"] {
            check(action, 1, action);
        }
    }

    #[test]
    fn a_slice_is_named_by_its_microbatch() {
        check("2F7", 2, "2F3.1");
        check("1RECV_B8", 4, "1RECV_B2.0");
        check("0UNSHARD", 4, "0UNSHARD");
        check("(0F7;7B3)OVERLAP_F_B", 3, "(0F2.1;7B1.0)OVERLAP_F_B");
    }
}
