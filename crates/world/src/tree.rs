//! The order in which parts of a sum are added: a balanced binary tree over them.
use std::ops::Range;

/// A balanced binary tree over leaves, some of which may hold nothing: a node over `a..b` adds its half up to
/// `a + ⌈(b - a) / 2⌉` to the rest. A half without anything adds nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    holds: Vec<bool>,
}

impl Tree {
    /// A tree over leaves that hold something where it says so.
    pub fn new(holds: Vec<bool>) -> Self {
        Self { holds }
    }

    /// A tree over `n` leaves that all hold something.
    pub fn full(n: usize) -> Self {
        Self::new(vec![true; n])
    }

    /// The number of leaves.
    pub fn leaves(&self) -> usize {
        self.holds.len()
    }

    fn is_empty(&self, node: &Range<usize>) -> bool {
        !self.holds[node.clone()].contains(&true)
    }

    /// The largest nodes of the tree that lie within `block` and hold something, in order: what the owner of the block can add up
    /// by itself.
    pub fn spans(&self, block: Range<usize>) -> Vec<Range<usize>> {
        let mut spans = Vec::new();
        self.cover(0..self.leaves(), &block, &mut spans);
        spans
    }

    fn cover(&self, node: Range<usize>, block: &Range<usize>, spans: &mut Vec<Range<usize>>) {
        let apart = node.end <= block.start || block.end <= node.start;
        if apart || self.is_empty(&node) {
        } else if block.start <= node.start && node.end <= block.end {
            spans.push(node);
        } else {
            let [left, right] = halves(&node);
            self.cover(left, block, spans);
            self.cover(right, block, spans);
        }
    }

    /// Adds up what lies under `node`. `known` is asked for the value of each node from the top down, and knows those of the
    /// leaves at least; `None` where nothing is held.
    pub fn fold<T, E>(
        &self,
        node: Range<usize>,
        known: &mut impl FnMut(&Range<usize>) -> Result<Option<T>, E>,
        add: &mut impl FnMut(T, T) -> T,
    ) -> Result<Option<T>, E> {
        if self.is_empty(&node) {
            return Ok(None);
        }
        if let Some(value) = known(&node)? {
            return Ok(Some(value));
        }
        if node.len() < 2 {
            return Ok(None);
        }
        let [left, right] = halves(&node);
        let (left, right) = (self.fold(left, known, add)?, self.fold(right, known, add)?);
        Ok(match (left, right) {
            (Some(left), Some(right)) => Some(add(left, right)),
            (one, other) => one.or(other),
        })
    }
}

fn halves(node: &Range<usize>) -> [Range<usize>; 2] {
    let middle = node.start + node.len().div_ceil(2);
    [node.start..middle, middle..node.end]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum as a formula.
    fn formula(tree: &Tree) -> String {
        let mut leaf = |node: &Range<usize>| Ok::<_, ()>((node.len() == 1).then(|| node.start.to_string()));
        tree.fold(0..tree.leaves(), &mut leaf, &mut |a, b| format!("({a}+{b})")).unwrap().unwrap_or_default()
    }

    #[test]
    fn the_order_is_fixed_by_the_number_of_leaves() {
        assert_eq!(formula(&Tree::full(1)), "0");
        assert_eq!(formula(&Tree::full(5)), "(((0+1)+2)+(3+4))");
        assert_eq!(formula(&Tree::full(8)), "(((0+1)+(2+3))+((4+5)+(6+7)))");
    }

    #[test]
    fn empty_leaves_add_nothing() {
        let tree = Tree::new(vec![true, true, true, false, false, false]);
        assert_eq!(formula(&tree), "((0+1)+2)");
        assert_eq!(tree.spans(3..6), []);
        assert_eq!(formula(&Tree::new(vec![false; 3])), "");
    }

    #[test]
    fn parts_of_any_owners_give_the_same_sum() {
        for leaves in 1..=24 {
            for held in 1..=leaves {
                let tree = Tree::new((0..leaves).map(|leaf| leaf < held).collect());
                let whole = formula(&tree);
                for owners in (1..=leaves).filter(|owners| leaves % owners == 0) {
                    let mut parts = std::collections::BTreeMap::new();
                    for block in (0..leaves).step_by(leaves / owners) {
                        for span in tree.spans(block..block + leaves / owners) {
                            let mut leaf = |node: &Range<usize>| {
                                Ok::<_, ()>((node.len() == 1).then(|| node.start.to_string()))
                            };
                            let part = tree.fold(span.clone(), &mut leaf, &mut |a, b| format!("({a}+{b})"));
                            parts.insert((span.start, span.end), part.unwrap().unwrap());
                        }
                    }
                    let mut known =
                        |node: &Range<usize>| Ok::<_, ()>(parts.get(&(node.start, node.end)).cloned());
                    let sum = tree.fold(0..leaves, &mut known, &mut |a, b| format!("({a}+{b})"));
                    assert_eq!(sum.unwrap().unwrap(), whole, "{held} of {leaves} leaves, {owners} owners");
                }
            }
        }
    }
}
