//! What the study of this project is about: the one place of the generic reports that names an optimizer. Everything else
//! asks here, and a report on runs without any of these has no subject.
use super::group::Group;

/// A method under study with its control, and what it stands beside.
pub(super) struct Subject {
    /// What it is called in texts.
    pub title: &'static str,
    /// The optimizers that are variants of it begin with this.
    family: &'static str,
    /// The setting that turns a run of it into its control.
    control: &'static str,
    /// What the control is, for a caption.
    pub control_says: &'static str,
    /// The optimizer it degenerates to.
    neighbour: &'static str,
    /// What that one is called in texts.
    pub neighbour_title: &'static str,
    /// The columns of the published tables; other optimizers come after these.
    order: &'static [&'static str],
}

/// The DecGD paper's.
pub(super) const SUBJECT: Subject = Subject {
    title: "DecGD",
    family: "decgd",
    control: "freeze_v",
    control_says: "v held at its start (freeze_v)",
    neighbour: "sgdm",
    neighbour_title: "SGD with momentum",
    order: &["sgdm", "aegd", "adam", "amsgrad", "adabound", "adabelief", "decgd"],
};

impl Subject {
    /// Whether a label or an optimizer's name is of the family.
    pub fn names(&self, label: &str) -> bool {
        label.starts_with(self.family)
    }

    /// Whether a group is the method itself and not its control.
    pub fn is(&self, group: &Group) -> bool {
        self.names(&group.optimizer) && !self.is_control(group)
    }

    /// Whether a group is the method under its own name, and no variant.
    pub fn is_plain(&self, group: &Group) -> bool {
        group.optimizer == self.family && !self.is_control(group)
    }

    /// Whether a group is the method's control.
    pub fn is_control(&self, group: &Group) -> bool {
        let setting = group.recipe().and_then(|recipe| recipe.optimizer.hyper.get(self.control));
        setting.and_then(serde_json::Value::as_bool) == Some(true)
    }

    /// Whether a group is what the method degenerates to.
    pub fn is_neighbour(&self, group: &Group) -> bool {
        group.optimizer == self.neighbour
    }

    /// An optimizer's place among the published columns.
    pub fn rank(&self, optimizer: &str) -> usize {
        self.order.iter().position(|name| *name == optimizer).unwrap_or(self.order.len())
    }
}
